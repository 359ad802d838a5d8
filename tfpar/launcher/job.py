"""The workers of a job on this machine: its restarts, its exit code, and the report at the end."""

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

_LONG_SECONDS = 30.0  # a worker group that ran this long did not fail at its start
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a job.

    Args:
        command: The command of every worker.
        num_workers: Number of workers of this host, at least 1.
        cores_per_worker: Cores of each worker, at least 1; if there are too few, all workers share all cores.
        max_restarts: Number of restarts of all workers after a failure; none after exit code 2, a usage error.
        grace_seconds: Time between the request to stop and SIGKILL.
        gpus: The GPUs of each worker; None leaves the workers' environment as it is.
        hosts: The workers of this host in a job over several hosts; None for a job on this machine.

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
    """Run a job to its end, with the standard output and error of this process. Only for the main thread.

    Args:
        job: The job.

    Returns:
        The exit code: 0, or that of the worker that failed first (128 + n if signal n killed it), or 128 + n if
        signal n stopped the job (SIGPIPE if the reader of the output is gone).

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
    """Return the exit code of a process as shells report it.

    Args:
        code: The exit code as Python reports it: -n for signal n.

    Example:
        >>> exit_code(-9)
        137
    """
    return 128 - code if code < 0 else code


def pause_seconds(short_starts: int) -> float:
    """Return the pause before a restart in seconds.

    Args:
        short_starts: Number of consecutive starts that failed within 30 seconds.

    Example:
        >>> [pause_seconds(count) for count in (0, 1, 2, 3, 100)]
        [0.0, 0.5, 1.0, 2.0, 5.0]
    """
    if short_starts == 0:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(short_starts - 1, 10), _LONGEST_PAUSE_SECONDS)


def _run_with_restarts(job: Job, outputs: Outputs, signals: StopSignals) -> WorkerGroup:
    """Start and restart the workers until success, a stop signal, or the last restart; return the last group."""
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
