"""The workers of one job, as processes that answer many questions one after another: starting them is what takes long.

    the tests' process                           worker 0, worker 1, ...
    Workers(program, ...) ── starts them ──►     answer_all({"question": function, ...})
    answers("question")  ◄── a file each ──      runs the functions in order, writes what each returns

A program is a module of `tests.support` that calls `answer_all`. What a function raises is an answer too.
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
from tfpar.cluster import tf_config
from tfpar.launcher.worker_group import free_addresses

START_SECONDS = 120.0  # to the first answer: TensorFlow's start, on a machine that does other things too
QUESTION_SECONDS = 120.0
TAIL_BYTES = 2000


class Raised(NamedTuple):
    """What a question raised instead of an answer."""

    kind: str
    message: str
    trace: str


class Workers:
    """The processes of one job.

    Args:
        program: A module of `tests.support`, such as `worker_program`.
        folder: An empty folder for answers and output.
        num_workers: How many.
        arguments: More for the program.
    """

    def __init__(self, program: str, folder: Path, num_workers: int, *arguments: str) -> None:
        self.folder = folder
        self._num_answered = 0
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
            "CUDA_VISIBLE_DEVICES": "-1",  # what is expected is computed on CPUs
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

    def answers(self, question: str) -> list[Any]:
        """Wait for the answers of all workers to a question, by rank; `Raised` where it raised.

        Raises:
            pytest.fail.Exception: If a worker ended without an answer or took too long, with the end of its output.
        """
        paths = [_answer(self.folder, rank, question) for rank in range(len(self._processes))]
        # They run in the order of the program, not of the tests: any answer of theirs is a sign of life.
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            ended = [rank for rank in missing if self._processes[rank].poll() is not None]
            if ended and not paths[ended[0]].exists():
                pytest.fail(f"worker {ended[0]} ended without an answer to {question!r}:\n{self._report()}", False)
            if self._silent_seconds() > (QUESTION_SECONDS + 10 if self._num_answered else START_SECONDS):
                pytest.fail(f"workers {missing} did not answer {question!r} in time:\n{self._report()}", False)
            time.sleep(0.02)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def finish(self) -> list[int]:
        """Wait for the end of all; return their exit codes."""
        deadline_seconds = time.monotonic() + QUESTION_SECONDS
        return [process.wait(max(0.0, deadline_seconds - time.monotonic())) for process in self._processes]

    def kill(self) -> None:
        """End what still runs, with all that it started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _silent_seconds(self) -> float:
        num_answered = sum(1 for _ in self.folder.glob("*/*.answer"))
        if num_answered != self._num_answered or not hasattr(self, "_heard_at"):
            self._num_answered, self._heard_at = num_answered, time.monotonic()
        return time.monotonic() - self._heard_at

    def _report(self) -> str:
        parts = []
        for rank, process in enumerate(self._processes):
            code = process.poll()
            state = "runs" if code is None else f"ended with {code}"
            out = (self.folder / f"{rank}.out").read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            parts.append(f"worker {rank} {state}, its output ends with:\n{out}")
        return "\n".join(parts)


@contextlib.contextmanager
def started(program: str, folder: Path, num_workers: int, *arguments: str) -> Iterator[Workers]:
    """Start workers; whatever happens, they are gone in the end."""
    workers = Workers(program, folder, num_workers, *arguments)
    try:
        yield workers
    finally:
        workers.kill()


def place() -> tuple[Path, int]:
    """In a worker: the folder of the job, and this worker's rank."""
    return Path(sys.argv[1]), int(sys.argv[2])


def answer_all(questions: Mapping[str, Callable[[], Any]]) -> None:
    """In a worker: answer the questions in order.

    What a question raises is its answer, and the next one follows. An error of TensorFlow's runtime ends the process,
    for nothing that communicates works after it; so does a question that takes too long: a worker waits for another
    that has gone on.
    """
    import tensorflow as tf

    folder, rank = place()
    parent = os.getppid()
    for question, function in questions.items():
        faulthandler.dump_traceback_later(QUESTION_SECONDS, exit=True)
        print(f"question: {question}", flush=True)
        if os.getppid() != parent:
            os._exit(1)  # the tests are gone
        try:
            answer = function()
        except tf.errors.OpError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        path = _answer(folder, rank, question)
        path.with_suffix(".unfinished").write_bytes(pickle.dumps(answer))
        path.with_suffix(".unfinished").rename(path)
    faulthandler.cancel_dump_traceback_later()


def _answer(folder: Path, rank: int, question: str) -> Path:
    return folder / str(rank) / f"{re.sub(r'[^A-Za-z0-9]+', '-', question)}.answer"
