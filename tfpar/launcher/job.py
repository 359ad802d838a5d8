"""A job on this machine: restarts, exit code and final report."""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections.abc import Sequence

from tfpar.commands.command_line import REPEATABLE
from tfpar.launcher.gpu_division import GpuDivision
from tfpar.launcher.hosts import HostPlan
from tfpar.launcher.log_output import Outputs
from tfpar.launcher.stop_signals import StopSignals
from tfpar.launcher.worker_group import WorkerGroup

_LONG_SECONDS = 30.0  # workers that ran this long did not fail at startup
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a job.

    Args:
        command: The command of every worker.
        num_workers: Number of workers on this host, at least 1.
        cores_per_worker: Number of cores per worker, at least 1. If there are too few, all workers share all cores.
        max_restarts: How often to restart all workers after a failure. Exit code 2, a usage error, is final.
        grace_seconds: Seconds between the request to stop and SIGKILL.
        gpus: The GPUs of each worker; None leaves their environment unchanged.
        hosts: This host's workers in a job over several hosts; None for a job on this machine.

    Example:
        >>> Job(["python", "-m", "tfpar.train"], num_workers=2, cores_per_worker=1).max_restarts
        0
    """

    command: Sequence[str]
    num_workers: int
    cores_per_worker: int
    max_restarts: int = 0
    grace_seconds: float = 30.0
    gpus: GpuDivision | None = None
    hosts: HostPlan | None = None


def launch(job: Job) -> int:
    """Run a job to its end. Call it from the main thread.

    Args:
        job: The job.

    Returns:
        0, or the exit code of the worker that failed first (128 + n if signal n killed it), or 128 + n if signal n
        stopped the job (SIGPIPE if the reader of the output is gone).

    Raises:
        OSError: If a worker cannot be started.

    Example:
        >>> launch(Job(["true"], num_workers=2, cores_per_worker=1))
        0
    """
    with StopSignals() as signals:
        outputs = Outputs(signals)
        first_rank = 0 if job.hosts is None else job.hosts.first_rank
        for line in [
            *([] if job.hosts is None else [job.hosts.line()]),
            *([] if job.gpus is None else job.gpus.lines(first_rank)),
        ]:
            outputs.say(line)
        group = _run_with_restarts(job, outputs, signals)
        if signals.stop is not None:
            outputs.say(f"Stopped by {signal.Signals(signals.stop).name}. {group.endings()}")
        elif group.failed is not None:
            for line in group.summary():
                outputs.say(line)
        outputs.write_rest()
    if signals.stop is not None:
        return 128 + signals.stop
    return 0 if group.failed is None else exit_code(group.failed.code)


def exit_code(code: int) -> int:
    """Convert an exit code from Python's convention (-n for signal n) to that of shells (128 + n).

    Example:
        >>> exit_code(-9)
        137
    """
    return 128 - code if code < 0 else code


def pause_seconds(short_starts: int) -> float:
    """Return the pause before a restart, in seconds.

    Args:
        short_starts: Number of consecutive attempts that failed within 30 seconds.

    Example:
        >>> [pause_seconds(count) for count in (0, 1, 2, 3, 100)]
        [0.0, 0.5, 1.0, 2.0, 5.0]
    """
    if short_starts == 0:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(short_starts - 1, 10), _LONGEST_PAUSE_SECONDS)


def _run_with_restarts(job: Job, outputs: Outputs, signals: StopSignals) -> WorkerGroup:
    """Run the workers until success, a stop signal, or the last restart; return the last attempt."""
    restarts = short_starts = 0
    while True:
        began_seconds = time.monotonic()
        group = WorkerGroup(job.command, job.num_workers, job.cores_per_worker, job.grace_seconds, job.gpus, job.hosts)
        group.run(outputs, signals)
        if signals.stop is not None or group.failed is None or restarts == job.max_restarts:
            return group
        if group.failed.code == REPEATABLE:
            outputs.say(
                f"No restart: exit code {REPEATABLE} means an error in flags, configuration or data: correct it."
            )
            return group
        restarts += 1
        short_starts = short_starts + 1 if time.monotonic() < began_seconds + _LONG_SECONDS else 0
        seconds = pause_seconds(short_starts)
        after = f" after a pause of {seconds:g} s" if seconds >= 1 else ""
        outputs.say(f"Restart {restarts} of {job.max_restarts}{after}, because {group.cause()}.")
        _pause(seconds, outputs, signals)
        if signals.stop is not None:
            return group


def _pause(seconds: float, outputs: Outputs, signals: StopSignals) -> None:
    """Wait some seconds, or until a stop signal arrives."""
    ends_seconds = time.monotonic() + seconds
    while signals.stop is None and (left := ends_seconds - time.monotonic()) > 0:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        outputs.register(poll)
        ready = dict(poll.poll(left * 1000))
        if signals.fileno() in ready:
            signals.read()
        outputs.write_some(ready)
