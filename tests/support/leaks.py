"""A fixture that fails a test if a process, a thread, a file or an environment variable remains after it.

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

SECONDS_TO_END = 3.0  # for processes that were just killed
# A process with this variable was started by the test, even if its parent has ended and init has adopted it.
MARK = "TFPAR_LEAK_MARK"
# pytest's own; and what `import tensorflow` sets when a test is the first to need it.
TENSORFLOW_VARIABLES = re.compile(
    r"TF2_BEHAVIOR|TPU_ML_PLATFORM\w*|KMP_\w+|ENABLE_RUNTIME_UPTIME_TELEMETRY|HDF5_PLUGIN_PATH"
)
ALLOWED_VARIABLES = re.compile(rf"{MARK}|PYTEST_CURRENT_TEST|{TENSORFLOW_VARIABLES.pattern}")
# Other programs write into the same folders at the same time: only names that runs of tfpar or TensorFlow create.
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
    """Return all processes of this machine, with the information whether their environment contains the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = b""
            with contextlib.suppress(OSError):  # of another user, or dead
                environment = (folder / "environ").read_bytes()
            is_marked = f"{MARK}={mark}".encode() in environment.split(b"\0")
            found.append(Process(int(folder.name), int(stat[1]), stat[0], command, is_marked))
    return found


def of_this_test(mark: str) -> list[Process]:
    """Return the processes that descend from this one or have the mark, including zombies."""
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
    """Return the files of tfpar and TensorFlow in the current folder and in the folder for temporary files."""
    folders = {Path.cwd(), Path(tempfile.gettempdir())}
    return {path for folder in folders for path in folder.iterdir() if OURS.search(path.name)}


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if a process, a thread, a file or a variable remains after this context; kill remaining processes.

    Raises:
        pytest.fail.Exception: With a list of what remains.
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
        pytest.fail("after the test remain:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test if a process, a thread, a file or an environment variable remains after it."""
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
