"""Four logical CPUs for the whole session: a strategy takes as many of them as its test asks for."""

import itertools
import os
import tempfile

import pytest

from tests.leaks import leaves_nothing_behind  # noqa: F401  a fixture for all tests

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests that run side by side do not see each other's temporary files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
    tempfile.tempdir = None


@pytest.fixture(scope="session")
def logical_cpus() -> list[str]:
    """Names of the session's devices; TensorFlow starts with the first test that asks for them."""
    import tfpar

    tfpar.use_logical_cpus(4)
    return ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files that wait for processes of their own take turns with others, which compute meanwhile.

    processes   a     b     c              with all of them at the end they would wait for each other
    others         d     e     f  g  h
    """
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if "multi_process" in path.name]
    computing = [path for path in files if path not in waiting]
    turns = [path for pair in itertools.zip_longest(waiting, computing) for path in pair if path is not None]
    position = {path: number for number, path in enumerate(turns)}
    items.sort(key=lambda item: position[item.path])
