"""The workers of one job, which run many functions one after another, because the start of TensorFlow takes seconds.

    the tests' process                           worker 0, worker 1, ...
    Workers(program, ...) ── starts them ──►     run_all({"name": function, ...})
    results("name")      ◄── a file each ──      runs the functions in order, writes the result of each

A program is a module of `tests.support` that calls `run_all`. The result of a function that raises is a `Raised`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ROOT
from tests.support import tracing
from tests.support.ports import free_addresses
from tfpar.cluster import tf_config

START_SECONDS = 120.0  # to the first result: TensorFlow's start on a machine with other work
FUNCTION_SECONDS = 120.0
TAIL_BYTES = 2000


class Raised(NamedTuple):
    """The exception of a function."""

    kind: str
    message: str
    trace: str


class Workers:
    """The processes of one job.

    Args:
        program: A module of `tests.support`, such as `worker_program`.
        folder: An empty folder for results and output.
        num_workers: Number of workers.
        arguments: Further arguments of the program.
    """

    def __init__(self, program: str, folder: Path, num_workers: int, *arguments: str) -> None:
        self.folder = folder
        self._num_results = 0
        self._addresses = free_addresses(num_workers)
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_workers):
            (folder / str(rank)).mkdir()
            self._processes.append(self._start(program, rank, arguments))

    def _start(self, program: str, rank: int, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
        environment |= {
            "TF_CONFIG": tf_config.to_tf_config(self._addresses, rank),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",  # the expected results are computed on CPUs
        }
        with (self.folder / f"{rank}.out").open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", f"tests.support.{program}", str(self.folder), str(rank), *arguments],
                cwd=self.folder / str(rank),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def results(self, name: str, num_workers: int | None = None) -> list[Any]:
        """Wait for the results of a function on all workers.

        Args:
            name: The name of the function in the program.
            num_workers: The number of workers that run the function, those of the lowest ranks; None for all.

        Returns:
            The results by rank; a `Raised` where the function raised.

        Raises:
            pytest.fail.Exception: If a worker ended without a result or took too long, with the end of its output.
        """
        paths = [_result(self.folder, rank, name) for rank in range(num_workers or len(self._processes))]
        # The functions run in the order of the program, not of the tests: the time limit starts at the last result.
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            ended = [rank for rank in missing if self._processes[rank].poll() is not None]
            if ended and not paths[ended[0]].exists():
                pytest.fail(f"worker {ended[0]} ended without a result of {name!r}:\n{self._report()}", False)
            if self._seconds_without_result() > (FUNCTION_SECONDS + 10 if self._num_results else START_SECONDS):
                pytest.fail(f"workers {missing} gave no result of {name!r} in time:\n{self._report()}", False)
            time.sleep(0.02)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        return self._processes[rank].pid

    def end_of(self, rank: int) -> int:
        """Wait for the end of a worker; return its exit code."""
        return self._processes[rank].wait(FUNCTION_SECONDS)

    def finish(self) -> list[int]:
        """Wait for the end of all workers; return their exit codes."""
        deadline_seconds = time.monotonic() + FUNCTION_SECONDS
        return [process.wait(max(0.0, deadline_seconds - time.monotonic())) for process in self._processes]

    def kill(self) -> None:
        """End the workers that still run, with all processes that they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _seconds_without_result(self) -> float:
        num_results = sum(1 for _ in self.folder.glob("*/*.result"))
        if num_results != self._num_results or not hasattr(self, "_last_result_at"):
            self._num_results, self._last_result_at = num_results, time.monotonic()
        return time.monotonic() - self._last_result_at

    def _report(self) -> str:
        parts = []
        for rank, process in enumerate(self._processes):
            code = process.poll()
            state = "is running" if code is None else f"ended with exit code {code}"
            out = (self.folder / f"{rank}.out").read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            parts.append(f"worker {rank} {state}; the end of its output:\n{out}")
        return "\n".join(parts)


@contextlib.contextmanager
def started(program: str, folder: Path, num_workers: int, *arguments: str) -> Iterator[Workers]:
    """Start workers, and end them with the context."""
    workers = Workers(program, folder, num_workers, *arguments)
    try:
        yield workers
    finally:
        workers.kill()


def results_of(job: Workers, function: str) -> list[Any]:
    """Return the results of a function on all workers, none of which is an error."""
    results = job.results(function)
    for rank, result in enumerate(results):
        assert not isinstance(result, Raised), f"worker {rank}: {result.trace}"
    return results


def place() -> tuple[Path, int]:
    """Return the folder of the job and the rank of this worker, in a worker."""
    return Path(sys.argv[1]), int(sys.argv[2])


def run_all(functions: Mapping[str, Callable[[], Any]]) -> None:
    """Run functions in order, in a worker, and write the result of each.

    After an exception the next function runs. An error of TensorFlow's runtime ends the process, because no collective
    operation works after it. So does a function that takes too long, because the other workers may have left it.
    """
    import tensorflow as tf

    tracing.with_rare_collections()
    tracing.without_origins()
    folder, rank = place()
    parent = os.getppid()
    for name, function in functions.items():
        faulthandler.dump_traceback_later(FUNCTION_SECONDS, exit=True)
        print(f"function: {name}", flush=True)
        if os.getppid() != parent:
            os._exit(1)  # the tests' process has ended
        try:
            result = function()
        except tf.errors.OpError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        path = _result(folder, rank, name)
        path.with_suffix(".unfinished").write_bytes(pickle.dumps(result))
        path.with_suffix(".unfinished").rename(path)
    faulthandler.cancel_dump_traceback_later()


def _result(folder: Path, rank: int, name: str) -> Path:
    return folder / str(rank) / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.result"
