"""Tasks in processes of their own, with time limits: a device that hangs or crashes ends its process alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROGRAM = "tfpar.checks.child_program"  # tests replace it by one whose devices have faults
_KILL_SECONDS = 2.0
_TAIL_BYTES = 20_000


@dataclasses.dataclass(frozen=True)
class Task:
    """A task for a process.

    Attributes:
        name: One of the tasks of `child_program`.
        arguments: Its arguments, as JSON takes them.
        seconds: The time limit, with the start of TensorFlow.
        environment: Variables of the process, besides those of this one.
        num_cpus: Logical CPUs to split the CPU into.
    """

    name: str
    arguments: Mapping[str, Any]
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_cpus: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a task.

    Attributes:
        result: What it returned; None if it did not end well.
        problem: Why not, as a clause; empty if it did.
        place: The file and line of the user's code that raised the error; empty for another error.
        stage: What it was doing when it ended; empty if that is unknown.
        errors: The end of its standard error.
    """

    result: Any = None
    problem: str = ""
    place: str = ""
    stage: str = ""
    errors: str = ""


def run_tasks(tasks: Sequence[Task], at_once: int = 1) -> list[Outcome]:
    """Run tasks until their end or their time limit; all their processes have ended when it returns.

    Args:
        tasks: The tasks.
        at_once: How many run at the same time.
    """
    with started(tasks, at_once) as outcomes:
        return [outcome.result() for outcome in outcomes]


@contextlib.contextmanager
def started(tasks: Sequence[Task], at_once: int = 1) -> Iterator[list[Future[Outcome]]]:
    """Run tasks in their order, and return the end of each as soon as it is known; none runs after this context.

    Args:
        tasks: The tasks.
        at_once: How many run at the same time.
    """
    running: list[subprocess.Popen[bytes]] = []
    pool = ThreadPoolExecutor(max_workers=max(1, at_once))
    try:
        yield [pool.submit(_run, task, running) for task in tasks]
    finally:  # after Ctrl-C, too
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            _kill(process)


def _run(task: Task, running: list[subprocess.Popen[bytes]]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="tfpar-doctor-") as folder:
        given = {
            "task": task.name,
            "arguments": dict(task.arguments),
            "seconds": task.seconds,
            "folder": folder,
            "num_cpus": task.num_cpus,
        }
        with (Path(folder) / "errors").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", **task.environment},
                start_new_session=True,
            )
        running.append(process)
        begin = time.monotonic()
        try:
            code: int | None = process.wait(task.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        return _outcome(Path(folder), task, code, time.monotonic() - begin)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits within a broken driver does not even end by SIGKILL: it is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def _outcome(folder: Path, task: Task, code: int | None, seconds: float) -> Outcome:
    stage, errors = _read(folder / "stage"), _read(folder / "errors")[-_TAIL_BYTES:]
    if code is None:
        return Outcome(None, f"it hung: no answer within {task.seconds:g} s", stage=stage, errors=errors)
    with contextlib.suppress(ValueError):
        found = json.loads(_read(folder / "result"))
        return Outcome(found.get("result"), found.get("problem", ""), found.get("place", ""), stage, errors)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Outcome(None, f"its process ended by {how} after {seconds:.0f} s", stage=stage, errors=errors)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
