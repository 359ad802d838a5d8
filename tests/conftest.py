"""Options, fixtures and order of all tests. They share four logical CPUs."""

import collections
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import crossed, extent, once, tracing
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  a fixture for all tests

if TYPE_CHECKING:
    from tests.support import command, workers

tracing.with_rare_collections()
# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP ignored; processes of tests would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-tables", action="store_true", help="run all rows and tests, of which CI takes a sample")
    parser.addoption("--gpu-stand-ins", action="store_true", help="run tests marked gpu on logical CPUs")


def pytest_configure(config: pytest.Config) -> None:
    """Let the programs of workers take as much as the tests."""
    if config.getoption("whole_tables"):
        os.environ[extent.VARIABLE] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a sample, and run first the files whose jobs take long and wait, so that none runs alone at the end."""
    if not extent.is_whole() and (left_out := crossed.left_out(items)):
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    num_tests = collections.Counter(item.path for item in items)
    waits = {item.path for item in items if item.get_closest_marker("multi_process")}
    items.sort(key=lambda item: (item.path not in waits, -num_tests[item.path], item.path))


@pytest.fixture(scope="session", autouse=True)
def references_of_this_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """Share the results of Keras on one device between parallel test processes."""
    folder = tmp_path_factory.getbasetemp()
    once.FOLDER = (folder.parent if hasattr(request.config, "workerinput") else folder) / "references"
    once.FOLDER.mkdir(exist_ok=True)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Separate the temporary files of parallel test processes."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
    tempfile.tempdir = None


@pytest.fixture(scope="session")
def logical_cpus() -> list[str]:
    """Return the names of four logical CPUs; the first test that needs them starts TensorFlow."""
    import tfpar

    tfpar.use_logical_cpus(4)
    tracing.without_origins()
    return ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@pytest.fixture
def call(
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    logical_cpus: list[str],
) -> "command.InProcess":
    """Return the train command in this process, in a folder with `own.py` if the test's module has its text, `OWN`."""
    from tests.support import command  # imports Keras

    if hasattr(request.module, "OWN"):
        monkeypatch.delitem(sys.modules, "own", raising=False)
        (tmp_path / "own.py").write_text(request.module.OWN)
    return command.InProcess(capfd, monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def jobs() -> "Iterator[workers.Pool]":
    """Return the started workers that files share."""
    from tests.support import workers  # imports Keras

    pool = workers.Pool()
    yield pool
    pool.end()


@pytest.fixture
def job(jobs: "workers.Pool", logical_cpus: list[str]) -> "workers.Job":
    """Return two started workers of two logical CPUs each."""
    return jobs.job()


@pytest.fixture(scope="module", autouse=True)
def frozen_remains() -> Iterator[None]:
    """Exclude the millions of objects that TensorFlow keeps of earlier traces from garbage collection."""
    yield
    gc.collect()
    gc.freeze()
