"""A job on this machine: how often its workers start, its exit code, and what the user is told at the end."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from tfpar.launcher.attempt import Attempt
from tfpar.launcher.guardian import Guardian
from tfpar.launcher.output import Outputs
from tfpar.launcher.requests import Requests


@dataclasses.dataclass(frozen=True)
class Job:
    """What to start, and how often.

    Args:
        command: The command of every worker.
        num_workers: How many, at least 1.
        cores_per_worker: Cores of each, at least 1; where there are too few, all share all.
        max_restarts: How many times all start again after a failure.
        grace_seconds: Between the request to stop and SIGKILL.

    Example:
        >>> Job(["python", "-m", "tfpar.train"], num_workers=2, cores_per_worker=1).max_restarts
        0
    """

    command: Sequence[str]
    num_workers: int
    cores_per_worker: int
    max_restarts: int = 0
    grace_seconds: float = 30.0


def launch(job: Job) -> int:
    """Run a job to its end, on the standard output and error of this process. Only for the main thread.

    Args:
        job: What to run.

    Returns:
        The exit code: 0, or that of the worker that failed first (128 + n if signal n killed it), or 128 + n if
        signal n stopped the job (SIGPIPE when nobody reads the output any more).

    Raises:
        OSError: If a worker or the guardian cannot be started.

    Example:
        >>> launch(Job(["true"], num_workers=2, cores_per_worker=1))
        0
    """
    with Requests() as requests, Guardian() as guardian:
        outputs = Outputs(requests)
        attempt = _attempts(job, guardian, outputs, requests)
        if requests.stop is not None:
            outputs.say(f"Stopped by {signal.Signals(requests.stop).name}. {attempt.endings()}")
        elif attempt.failed is not None:
            for line in attempt.summary():
                outputs.say(line)
        outputs.write_rest()
    if requests.stop is not None:
        return 128 + requests.stop
    return 0 if attempt.failed is None else exit_code(attempt.failed.code)


def exit_code(code: int) -> int:
    """Return how a shell reports the code of a process.

    Args:
        code: As Python gives it: -n for signal n.

    Example:
        >>> exit_code(-9)
        137
    """
    return 128 - code if code < 0 else code


def _attempts(job: Job, guardian: Guardian, outputs: Outputs, requests: Requests) -> Attempt:
    """Start the workers until they end well, are told to stop, or have failed too often; return the last attempt."""
    restarts = 0
    while True:
        attempt = Attempt(job.command, job.num_workers, job.cores_per_worker, job.grace_seconds)
        attempt.run(guardian, outputs, requests)
        if requests.stop is not None or attempt.failed is None or restarts == job.max_restarts:
            return attempt
        restarts += 1
        outputs.say(f"Restart {restarts} of {job.max_restarts}, because {attempt.cause()}.")
