"""The experiment `restart`: seconds from `kill -9` of a worker to the next trained step, under `tfpar.launch`.

steps ── steps ── kill -9 ──┬── noticed, all stopped ── TensorFlow starts, cluster forms, last checkpoint ──┬── steps
                            └──────────────────────────── these seconds ────────────────────────────────────┘
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Experiment, Finding, Output
from benchmarks.pipelines.figures import saved
from benchmarks.process import ROOT, WorkerError

CHECKPOINT_SECONDS = 1.0
LONGER_SECONDS = 2.0  # at most, of a pipeline across workers, than of MultiWorker


class Step(NamedTuple):
    """A line of the chief's record: steps of the run that are done, and when."""

    pid: int
    step: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Restart:
    """One kill.

    Args:
        strategy: Of the workers, one of `benchmarks.restart_worker.STRATEGIES`.
        num_workers: Workers of the job; the one of rank 1 is killed.
        timeout_seconds: From the start of the job to the first step after the kill.
    """

    strategy: str = "multi_worker"
    num_workers: int = 2
    timeout_seconds: float = 180.0


def measure(setting: Restart) -> Output:
    """Return the seconds from the kill to the next trained step, and how many steps were trained twice.

    Args:
        setting: The job.

    Raises:
        WorkerError: If the workers do not train in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tfpar.launch", "--num_workers", str(setting.num_workers)]
        command += ["--max_restarts", "1", "--grace_seconds", "5", "--", "-m", "benchmarks.restart_worker", name]
        command += [setting.strategy]
        errors = folder / "errors"
        with errors.open("wb") as file:
            launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
        try:
            return _kill_and_wait(folder, launcher, setting.timeout_seconds)
        except WorkerError as error:
            last_lines = "\n".join(errors.read_text(errors="replace").splitlines()[-10:])
            raise WorkerError(f"{error}; {last_lines}") from None
        finally:
            _end(launcher)


def _kill_and_wait(folder: Path, launcher: subprocess.Popen[bytes], timeout_seconds: float) -> Output:
    deadline = time.monotonic() + timeout_seconds
    # Some steps after a checkpoint, as in the middle of a run.
    _wait(lambda: any((folder / "checkpoints").glob("*.npz")), launcher, deadline)
    time.sleep(1.5 * CHECKPOINT_SECONDS)
    chief = record(folder)[-1].pid
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    killed = time.time()
    _wait(lambda: record(folder)[-1].pid != chief, launcher, deadline)
    steps = record(folder)
    last = max(step.step for step in steps if step.pid == chief)
    first = next(step for step in steps if step.pid != chief)
    return {"restart_seconds": first.seconds - killed, "steps_again": max(0, last - first.step + 1)}


def record(folder: Path) -> list[Step]:
    """Return the lines that the chief has written, whole ones only.

    Args:
        folder: Of the run.
    """
    path = folder / "steps"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [line.split() for line in text.rpartition("\n")[0].splitlines()]
    return [Step(int(pid), int(step), float(seconds)) for pid, step, seconds in lines]


def _wait(came: Callable[[], bool], launcher: subprocess.Popen[bytes], deadline: float) -> None:
    while not came():
        if launcher.poll() is not None:
            raise WorkerError(f"the launcher ended with exit status {launcher.returncode}")
        if time.monotonic() > deadline:
            raise WorkerError("the workers did not train in time")
        time.sleep(0.02)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Let the launcher stop its workers; a second signal and then SIGKILL, should it not."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if launcher.poll() is None:
            launcher.send_signal(number)
        try:
            launcher.wait(timeout=20)
            return
        except subprocess.TimeoutExpired:
            continue


def as_lines(steps: Sequence[Step]) -> str:
    """Return a record as `record` reads it.

    Args:
        steps: In order.
    """
    return "".join(f"{step.pid} {step.step} {step.seconds!r}\n" for step in steps)


def _experiment() -> Experiment:
    """Compare the strategies of several processes with each other."""
    settings = {
        "tfpar.MultiWorker, 2 workers": Restart(),
        "tfpar.Hybrid, 2 workers x 2 stages": Restart("hybrid"),
        "tfpar.Pipeline, 2 stages across 2 workers": Restart("pipeline"),
    }
    base, *others = settings
    findings = [
        Finding(
            f"{one} - {base}", saved(base, one, "restart_seconds"), at_most=LONGER_SECONDS if "across" in one else None
        )
        for one in others
    ]
    summary = "Two workers of the CNN, kill -9 of worker 1: seconds to the next trained step under tfpar.launch"
    return Experiment("restart", summary, "restart_seconds", settings, measure, tuple(findings))


RESTART = _experiment()
