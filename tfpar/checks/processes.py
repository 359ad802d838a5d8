"""Tasks in subprocesses with time limits, so that a device that hangs or crashes only ends its subprocess."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from tfpar.commands import parent_process
from tfpar.messages import tensorflow_log, users_code
from tfpar.messages.reasons import message_of

_SPAWN = multiprocessing.get_context("spawn")
_KILL_SECONDS = 2.0
_LONGEST_MESSAGE, _LONGEST_ERRORS = 400, 20_000
_starting = threading.Lock()
_to_parent: list[Connection] = []  # in a child


@dataclasses.dataclass(frozen=True)
class Task:
    """A task for a subprocess.

    Attributes:
        function: A function of this package, such as "device_tasks.see".
        arguments: Its keyword arguments.
        seconds: Time limit, including the start of TensorFlow.
        environment: Environment variables, added to those of this process.
        num_cpus: Number of logical CPUs.
    """

    function: str
    arguments: Mapping[str, Any]
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_cpus: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a task.

    Attributes:
        result: The return value; None if the task failed.
        problem: Why it failed, as a clause.
        place: The file and line of user code that raised the error; empty for other errors.
        stage: What it was doing when it ended; may be empty.
        errors: The end of its standard error.
    """

    result: Any = None
    problem: str = ""
    place: str = ""
    stage: str = ""
    errors: str = ""


@contextlib.contextmanager
def started(tasks: Sequence[Task], at_once: int = 1) -> Iterator[list[Future[Outcome]]]:
    """Run tasks in order, and yield a future for each outcome. No task outlives this context.

    Args:
        tasks: The tasks.
        at_once: Number of tasks that run concurrently.
    """
    running: list[SpawnProcess] = []
    pool = ThreadPoolExecutor(max_workers=max(1, at_once))
    try:
        yield [pool.submit(_outcome, task, running) for task in tasks]
    finally:  # after Ctrl-C, too
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [*running]:
            _kill(process)


def at_stage(name: str) -> None:
    """Tell the parent what the task does next, in case it hangs."""
    for connection in _to_parent:
        connection.send(name)


def run_in_child(to_parent: Connection, errors: str, task: Task) -> None:
    """Run a task in the subprocess, and send its outcome to the parent."""
    parent_process.end_with_parent()
    os.setsid()  # so that its child processes end with it
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    tensorflow_log.uninstall()
    os.environ.update({tensorflow_log.LEVEL: "0", **task.environment})
    sys.argv[1:] = []  # a script of the user may read flags
    _to_parent.append(to_parent)
    try:
        to_parent.send(Outcome(_result(task)))
    except (Exception, SystemExit) as error:  # the script may also exit
        message = f"{type(error).__name__}: {' '.join(message_of(error).split())[:_LONGEST_MESSAGE]}"
        to_parent.send(Outcome(None, message, users_code.users_place(error)))


def _result(task: Task) -> Any:
    at_stage("the start of TensorFlow")
    if task.num_cpus > 1:
        import tfpar

        tfpar.use_logical_cpus(task.num_cpus)
    module, _, name = task.function.rpartition(".")
    return getattr(importlib.import_module(f"tfpar.checks.{module}"), name)(**task.arguments)


def _outcome(task: Task, running: list[SpawnProcess]) -> Outcome:
    from_child, to_parent = _SPAWN.Pipe(duplex=False)
    with from_child, tempfile.NamedTemporaryFile(prefix="tfpar-doctor-") as errors:
        with to_parent:
            process = _SPAWN.Process(target=run_in_child, args=(to_parent, errors.name, task))
            _start(process)
        running.append(process)
        try:
            outcome = _received(process, from_child, task.seconds)
        finally:
            _kill(process)
            running.remove(process)
        return dataclasses.replace(outcome, errors=Path(errors.name).read_text(errors="replace")[-_LONGEST_ERRORS:])


def _start(process: SpawnProcess) -> None:
    """Start a process that does not import the user's script as its main module, which might train."""
    with _starting:
        script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script


def _received(process: SpawnProcess, from_child: Connection, seconds: float) -> Outcome:
    begin, stage = time.monotonic(), ""
    while wait([from_child, process.sentinel], max(0.0, begin + seconds - time.monotonic())):
        try:
            message = from_child.recv() if from_child.poll() else None
        except EOFError:
            message = None
        if isinstance(message, Outcome):
            return dataclasses.replace(message, stage=stage)
        if message is None:
            process.join(_KILL_SECONDS)
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(None, f"its process ended by {how} after {time.monotonic() - begin:.0f} s", stage=stage)
        stage = message
    return Outcome(None, f"it hung: no answer within {seconds:g} s", stage=stage)


def _kill(process: SpawnProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it has no session yet
    process.join(_KILL_SECONDS)  # with a time limit: a process that hangs in a broken driver survives SIGKILL
