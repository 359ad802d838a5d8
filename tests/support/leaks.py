"""A fixture that fails a test which leaves a process, a thread, a file or an environment variable behind.

For a whole file: `pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

SECONDS_TO_END = 3.0  # what was just killed is gone a moment later
# A process that has this variable was started by the test, even if its parent has died and init has taken it over.
MARK = "TFPAR_LEAK_MARK"
# pytest's own; and what `import tensorflow` sets when a test is the first to need it.
TENSORFLOW_VARIABLES = re.compile(
    r"TF2_BEHAVIOR|TPU_ML_PLATFORM\w*|KMP_\w+|ENABLE_RUNTIME_UPTIME_TELEMETRY|HDF5_PLUGIN_PATH"
)
ALLOWED_VARIABLES = re.compile(rf"{MARK}|PYTEST_CURRENT_TEST|{TENSORFLOW_VARIABLES.pattern}")
# Others write into the same folders at the same time: only names that a run of ours or of TensorFlow gives.
OURS = re.compile(r"tfpar|tensorflow|tensorboard|keras|^tf[_-]|^runs$|^checkpoints$|^core(\.\d+)?$", re.IGNORECASE)
Found = TypeVar("Found")


class Process(NamedTuple):
    """A process of this machine."""

    pid: int
    parent: int
    state: str
    command: str
    is_marked: bool


def processes(mark: str) -> list[Process]:
    """All processes of this machine; those with a mark of ours in their environment are told apart."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = b""
            with contextlib.suppress(OSError):  # somebody else's, or dead
                environment = (folder / "environ").read_bytes()
            is_marked = f"{MARK}={mark}".encode() in environment.split(b"\0")
            found.append(Process(int(folder.name), int(stat[1]), stat[0], command, is_marked))
    return found


def of_this_test(mark: str) -> list[Process]:
    """Processes that descend from this one or carry the mark; dead ones too, if nobody waited for them."""
    everyone = processes(mark)
    family = {os.getpid()}
    while more := {one.pid for one in everyone if one.parent in family} - family:
        family |= more
    return [
        one
        for one in everyone
        if (one.pid in family or one.is_marked)
        and one.pid != os.getpid()
        # Python's own, one for all users of multiprocessing; it ends with this process.
        and "multiprocessing.resource_tracker" not in one.command
    ]


def files() -> set[Path]:
    """What lies in the current folder and in that for temporary files, and looks like ours."""
    folders = {Path.cwd(), Path(tempfile.gettempdir())}
    return {path for folder in folders for path in folder.iterdir() if OURS.search(path.name)}


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if what runs inside leaves something behind; processes that it left are killed.

    Raises:
        pytest.fail.Exception: With all that was found.
    """
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    environment, threads, there = dict(os.environ), set(threading.enumerate()), files()
    running = {one.pid for one in of_this_test(mark)}
    try:
        yield
    finally:
        changed = _changed(environment)
        os.environ.pop(MARK, None)
        left_processes = _wait_until_empty(lambda: [one for one in of_this_test(mark) if one.pid not in running])
        left_threads = _wait_until_empty(lambda: [one for one in threading.enumerate() if one not in threads])
        for process in left_processes:
            _end(process)
    found = [f"process {one.pid} ({one.state}): {one.command}" for one in left_processes]
    found += [f"thread {one.name}" for one in left_threads]
    found += [f"file {path}" for path in sorted(files() - there)]
    found += [f"environment variable {name}" for name in changed]
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test if it leaves a process, a thread, a file or an environment variable behind."""
    with nothing_left_behind():
        yield


def _changed(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    return sorted(
        name for name in {*before, *now} if before.get(name) != now.get(name) and not ALLOWED_VARIABLES.fullmatch(name)
    )


def _wait_until_empty(look: Callable[[], list[Found]]) -> list[Found]:
    deadline_seconds = time.monotonic() + SECONDS_TO_END
    while (found := look()) and time.monotonic() < deadline_seconds:
        time.sleep(0.02)
    return found


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)
