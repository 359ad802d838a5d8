"""A job on this machine: how often its workers start, its exit code, and what the user is told at the end."""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections.abc import Sequence

from tfpar.commands.command_line import REPEATABLE
from tfpar.launcher.log_output import Outputs
from tfpar.launcher.reaper import Reaper
from tfpar.launcher.stop_signals import StopSignals
from tfpar.launcher.worker_group import WorkerGroup

_LONG_SECONDS = 30.0  # a start that lasted this long was no failed start
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What to start, and how often.

    Args:
        command: The command of every worker.
        num_workers: How many, at least 1.
        cores_per_worker: Cores of each, at least 1; where there are too few, all share all.
        max_restarts: How many times all start again after a failure; never after exit code 2, a usage error.
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
        OSError: If a worker or the reaper cannot be started.

    Example:
        >>> launch(Job(["true"], num_workers=2, cores_per_worker=1))
        0
    """
    with StopSignals() as requests, Reaper() as reaper:
        outputs = Outputs(requests)
        attempt = _attempts(job, reaper, outputs, requests)
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


def pause_seconds(short_starts: int) -> float:
    """Return how long to wait before workers start again.

    Args:
        short_starts: How many starts in a row failed within 30 seconds.

    Example:
        >>> [pause_seconds(count) for count in (0, 1, 2, 3, 100)]
        [0.0, 0.5, 1.0, 2.0, 5.0]
    """
    if short_starts == 0:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(short_starts - 1, 10), _LONGEST_PAUSE_SECONDS)


def _attempts(job: Job, reaper: Reaper, outputs: Outputs, requests: StopSignals) -> WorkerGroup:
    """Start the workers until they end well, are asked to stop, or have failed too often; return the last attempt."""
    restarts = short_starts = 0
    while True:
        began_seconds = time.monotonic()
        attempt = WorkerGroup(job.command, job.num_workers, job.cores_per_worker, job.grace_seconds)
        attempt.run(reaper, outputs, requests)
        if requests.stop is not None or attempt.failed is None or restarts == job.max_restarts:
            return attempt
        if attempt.failed.code == REPEATABLE:
            outputs.say(
                f"No restart: exit code {REPEATABLE} means flags, configuration or data that must be corrected."
            )
            return attempt
        restarts += 1
        short_starts = short_starts + 1 if time.monotonic() < began_seconds + _LONG_SECONDS else 0
        seconds = pause_seconds(short_starts)
        after = f" after a pause of {seconds:g} s" if seconds >= 1 else ""
        outputs.say(f"Restart {restarts} of {job.max_restarts}{after}, because {attempt.cause()}.")
        _pause(seconds, reaper, outputs, requests)
        if requests.stop is not None:
            return attempt


def _pause(seconds: float, reaper: Reaper, outputs: Outputs, requests: StopSignals) -> None:
    """Wait some seconds, or until the job is asked to stop."""
    ends_seconds = time.monotonic() + seconds
    while requests.stop is None and (left := ends_seconds - time.monotonic()) > 0:
        poll = select.poll()
        poll.register(requests, select.POLLIN)
        poll.register(reaper, select.POLLIN)
        outputs.register(poll)
        ready = dict(poll.poll(left * 1000))
        if requests.fileno() in ready:
            requests.read()
        if reaper.fileno() in ready:
            outputs.say(reaper.replace())
        outputs.write_some(ready)
