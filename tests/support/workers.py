"""Started workers that call functions for tests, because the start of TensorFlow takes seconds.

    the tests' process                         worker 0, worker 1, ...
    job.run(function, ...)  ── the call ──►    imports the function and calls it
    [result, result, ...]   ◄── by rank ──     with the TF_CONFIG of its rank

A function stands beside its test, in the same module. A test that leaves a broken cluster ends the job with
`job.kill()`; the next test gets another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import keras
import pytest

from tests import ROOT
from tests.support.ports import free_addresses
from tfpar.cluster import tf_config

CALL_SECONDS = 120.0  # of a function, and of TensorFlow's start on a machine with other work
MAX_JOBS = 2  # that wait for calls
TAIL_BYTES = 2000


class Call(NamedTuple):
    """A call that workers receive."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    dtype: str


class Raised(NamedTuple):
    """The exception of a function."""

    kind: str
    message: str
    trace: str


class Started(NamedTuple):
    """A call that workers run while the test computes what it expects."""

    job: Job
    number: int

    def outcomes(self, num_workers: int | None = None) -> list[Any]:
        """Wait for the call on the workers of the lowest ranks, None for all; return results and exceptions by rank."""
        return self.job.outcomes_of(self.number, num_workers)

    def results(self, num_workers: int | None = None) -> list[Any]:
        """Wait for the call; return the results by rank, none of which is an exception."""
        outcomes = self.outcomes(num_workers)
        for rank, outcome in enumerate(outcomes):
            assert not isinstance(outcome, Raised), f"worker {rank}: {outcome.trace}"
        return outcomes


class Job:
    """The workers of one job.

    Args:
        num_workers: Number of workers.
        num_cpus: Number of logical CPUs of each worker; a sequence if they differ.
    """

    def __init__(self, num_workers: int = 2, num_cpus: int | Sequence[int] = 2) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.is_alive = True
        self._num_calls = 0
        self._channels: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        addresses = free_addresses(num_workers)
        for rank in range(num_workers):
            cpus_here = num_cpus if isinstance(num_cpus, int) else num_cpus[rank]
            self._start(tf_config.to_tf_config(addresses, rank), rank, cpus_here)

    def _start(self, place: str, rank: int, num_cpus: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
        environment |= {
            "TF_CONFIG": place,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",  # the expected results are computed on CPUs
        }
        channel, of_worker = Pipe()
        self._channels.append(channel)
        self.folder_of(rank).mkdir()
        with of_worker, self._output(rank).open("wb") as out:
            words = [sys.executable, "-m", "tests.support.worker_program", str(of_worker.fileno()), str(num_cpus)]
            process = subprocess.Popen(
                words, cwd=self.folder_of(rank), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                pass_fds=[of_worker.fileno()], start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every worker, in the float type of this process.

        Args:
            function: A function of a module.
            arguments: Its arguments, which pickle takes.

        Returns:
            The results by rank.

        Raises:
            pytest.fail.Exception: If a worker ended without a result or took too long, with the end of its output.
        """
        return self.start(function, *arguments).results()

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every worker; return the results by rank, and a `Raised` where it raised."""
        return self.start(function, *arguments).outcomes()

    def run_on_chief(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on every worker, and return the result of the first alone, which uses the others' devices."""
        (result,) = self.start(function, *arguments).results(num_workers=1)
        return result

    def start(self, function: Callable[..., Any], *arguments: Any) -> Started:
        """Begin a call on every worker."""
        self._num_calls += 1
        call = Call(self._num_calls, function, arguments, keras.config.floatx())
        for channel in self._channels:
            with contextlib.suppress(BrokenPipeError):  # a worker that has ended is reported with the results
                channel.send(call)
        return Started(self, call.number)

    def outcomes_of(self, number: int, num_workers: int | None) -> list[Any]:
        """Return the outcomes of a call by rank, those of calls before it dropped."""
        waiting = dict(zip(self._channels[:num_workers], range(len(self._channels)), strict=False))
        outcomes: dict[int, Any] = {}
        deadline_seconds = time.monotonic() + CALL_SECONDS + 10
        while waiting:
            ready = wait([*waiting], deadline_seconds - time.monotonic())
            if not ready:
                self._fail(f"workers {[*waiting.values()]} gave no result in time")
            for channel in ready:
                assert isinstance(channel, Connection)
                try:
                    answered, outcome = channel.recv()
                except (EOFError, ConnectionResetError):
                    self._fail(f"worker {waiting[channel]} ended without a result")
                if answered == number:
                    outcomes[waiting.pop(channel)] = outcome
        return [outcomes[rank] for rank in sorted(outcomes)]

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        return self._processes[rank].pid

    def folder_of(self, rank: int) -> Path:
        """Return the current folder of a worker."""
        return self.folder / str(rank)

    def output(self, rank: int) -> str:
        """Return what a worker has written."""
        return self._output(rank).read_text(errors="replace")

    def end_of(self, rank: int) -> int:
        """Wait for the end of a worker; return its exit code."""
        return self._processes[rank].wait(CALL_SECONDS)

    def finish(self) -> list[int]:
        """End the job; return the exit codes of the workers."""
        self.is_alive = False
        for channel in self._channels:
            channel.close()
        return [self.end_of(rank) for rank in range(len(self._processes))]

    def kill(self) -> None:
        """End the workers at once, with all processes that they started."""
        self.is_alive = False
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _output(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def _fail(self, reason: str) -> NoReturn:
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)  # a running one writes where it waits
        time.sleep(0.5)
        codes = [process.poll() for process in self._processes]
        self.kill()
        parts = [
            f"worker {rank} {'was running' if code is None else f'had exit code {code}'}; the end of its output:\n"
            f"{self.output(rank)[-TAIL_BYTES:]}"
            for rank, code in enumerate(codes)
        ]
        pytest.fail("\n".join([f"{reason}:", *parts]), pytrace=False)


@contextlib.contextmanager
def started(num_workers: int = 2, num_cpus: int | Sequence[int] = 2) -> Iterator[Job]:
    """Start a job for one test or one file, and end it with the context."""
    job = Job(num_workers, num_cpus)
    try:
        yield job
    finally:
        job.kill()


class Pool:
    """Started jobs that the files of a test process share."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, int], Job] = {}

    def job(self, num_workers: int = 2, num_cpus: int = 2) -> Job:
        """Return a job that waits for calls; the one that was not used for longest ends where there are too many."""
        job = self._jobs.pop((num_workers, num_cpus), None)
        if job is None or not job.is_alive:
            if len(self._jobs) == MAX_JOBS:
                self._jobs.pop(next(iter(self._jobs))).finish()
            job = Job(num_workers, num_cpus)
        self._jobs[num_workers, num_cpus] = job
        return job

    def end(self) -> None:
        """End all jobs, which must end without an error."""
        codes = [job.finish() for job in self._jobs.values() if job.is_alive]
        assert not any(itertools.chain(*codes)), f"exit codes {codes}"


def rank() -> int:
    """Return the rank of this worker, in a worker."""
    job = tf_config.from_environment(os.environ)
    assert job is not None
    return job.rank
