"""The fixture `leaves_nothing_behind` finds all remains of a test, and nothing else."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.leaks import nothing_left_behind

pytestmark = pytest.mark.multi_process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a separate folder, and a short time limit for leaks to end."""
    monkeypatch.setattr(leaks, "SECONDS_TO_END", 0.3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def reports(expected: str) -> Iterator[None]:
    """Assert that the fixture finds remains of this context."""
    with pytest.raises(pytest.fail.Exception, match=expected), nothing_left_behind():
        yield


def test_a_test_that_cleans_up_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left_behind():
        subprocess.run(["true"], check=True)
        thread = threading.Thread(target=time.sleep, args=(0.1,))
        thread.start()  # ends a moment later: soon enough
        (tmp_path / "somebody_else.txt").touch()
        (tmp_path / "tfpar-mine").touch()
        (tmp_path / "tfpar-mine").unlink()
        with monkeypatch.context() as patch:
            patch.setenv("TF_CONFIG", "{}")
    assert leaks.MARK not in os.environ


def test_a_child_is_found_and_ended() -> None:
    with reports(r"process \d+ \(S\): sleep 60"):
        child = subprocess.Popen(["sleep", "60"])
    with contextlib.suppress(ChildProcessError):
        assert child.wait(1) == 0, "already waited for"


def test_a_child_that_nobody_waited_for_is_found() -> None:
    with reports(r"process \d+ \(Z\)"):
        child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.poll()


def test_an_orphan_is_found_by_its_mark() -> None:
    starts_and_dies = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    # The orphan holds the output open, so it is a file: a pipe would keep this test waiting.
    with tempfile.TemporaryFile() as out:
        with reports(r"process \d+ \(S\): sleep 60"):
            subprocess.run([sys.executable, "-c", starts_and_dies], check=True, stdout=out)
        out.seek(0)
        orphan = int(out.read())
    deadline = time.monotonic() + 10.0  # it was ended; its new parent takes a moment to bury it
    while Path(f"/proc/{orphan}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{orphan}/exe").exists(), "it was ended"


def test_a_thread_is_found() -> None:
    stop = threading.Event()
    with reports("thread left-over"):
        thread = threading.Thread(target=stop.wait, name="left-over")
        thread.start()
    stop.set()
    thread.join()


def test_files_are_found_in_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with reports(r"file .*here/runs\n.*file .*tfpar-left"):
        (tmp_path / "here" / "runs").mkdir()
        (tmp_path / "tfpar-left").touch()


def test_environment_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPAR_CHANGED", "1")
    monkeypatch.setenv("TFPAR_GONE", "1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    try:
        with reports(r"variable TFPAR_CHANGED\n.*variable TFPAR_GONE\n.*variable TF_CONFIG"):
            os.environ["TF_CONFIG"] = "{}"
            os.environ["TFPAR_CHANGED"] = "2"
            del os.environ["TFPAR_GONE"]
    finally:
        os.environ.pop("TF_CONFIG", None)


def test_a_failure_of_the_test_itself_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), nothing_left_behind():
        raise ZeroDivisionError
