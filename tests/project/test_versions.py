"""Versions of Keras and TensorFlow: requirements, warnings at import, errors for missing private names."""

import configparser
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tfpar._compat import versions

ROOT = next(parent for parent in Path(__file__).parents if (parent / "setup.cfg").exists())
PROGRAM = "import sys, tfpar\nprint('tensorflow' in sys.modules or 'keras' in sys.modules)\n"


def start(folder: Path, installed: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Import tfpar in a new process for which packages of these versions are installed."""
    for name, version in installed.items():
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )


def test_setup_requires_the_tested_range() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = settings["options"]["install_requires"].splitlines()
    assert {versions._range(name) for name in versions.TESTED} <= set(required)


@pytest.mark.parametrize(
    ("installed", "parts"),
    [
        ({"keras": "3.17.0"}, ["keras >= 3.15, < 3.17", "received keras 3.17.0:"]),
        ({"tensorflow": "2.22.0rc1"}, ["tensorflow >= 2.21, < 2.22", "received tensorflow 2.22.0rc1:"]),
        ({"keras": "3.9.2", "tensorflow": "2.20.0"}, ["received keras 3.9.2 and tensorflow 2.20.0:"]),
    ],
    ids=["later Keras", "later TensorFlow", "both earlier"],
)
def test_an_import_warns_once_of_untested_versions(tmp_path: Path, installed: dict[str, str], parts: list[str]) -> None:
    completed = start(tmp_path, installed)
    assert completed.stdout == "False\n", "the check imports neither"
    assert completed.stderr.count("Warning") == 1, completed.stderr
    assert completed.stderr.startswith(f"{tmp_path / 'program.py'}:1: "), "at the user's own line"
    assert all(part in completed.stderr for part in [*parts, "pip install"]), completed.stderr


def test_an_import_says_nothing_of_tested_versions(tmp_path: Path) -> None:
    completed = start(tmp_path, {"keras": "3.16.2", "tensorflow": "2.21.1"})
    assert completed.stderr == ""


def test_a_private_name_that_is_missing_is_named_with_the_tested_versions() -> None:
    class Upstream:
        here = 1

        def reads(self) -> object:
            return getattr(self, "_late", self.here)

    upstream = Upstream()
    assert versions.private(upstream, "here") == 1
    versions.replace(upstream, "here", 2)
    assert upstream.here == 2
    versions.require_mentioned(Upstream.reads, "_late")
    tested = r"install keras >= 3\.15, < 3\.17 and tensorflow >= 2\.21, < 2\.22"
    with pytest.raises(RuntimeError, match=rf"'_gone' of .*Upstream in keras [\d.]+, tensorflow [\d.]+: {tested}"):
        versions.private(upstream, "_gone")
    with pytest.raises(RuntimeError, match=r"'_gone' of tests_upstream in"):
        versions.replace(types.ModuleType("tests_upstream"), "_gone", 2)
    with pytest.raises(RuntimeError, match=r"'_gone' in .*Upstream\.reads in"):
        versions.require_mentioned(Upstream.reads, "_gone")
    assert not hasattr(upstream, "_gone")
