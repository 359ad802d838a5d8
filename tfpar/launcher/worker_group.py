"""The worker processes of one attempt: the first failure, and the end of the others."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

from tfpar.cluster import job_secret
from tfpar.commands.start_up import INTERRUPTED  # also the exit code of a worker that stopped with a checkpoint
from tfpar.launcher.gpu_division import GpuDivision
from tfpar.launcher.hosts import HostPlan
from tfpar.launcher.log_output import Outputs
from tfpar.launcher.reserved_ports import ReservedPorts
from tfpar.launcher.stop_signals import StopSignals
from tfpar.launcher.worker import OutputStream, Worker, worker_cores, worker_environment

# A worker that lost a peer cannot write a checkpoint: it only prints its error.
SECONDS_AFTER_FAILURE = 5.0


class WorkerGroup:
    """The worker processes of one attempt; the arguments are those of `Job`."""

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        cores_per_worker: int,
        grace_seconds: float,
        gpus: GpuDivision | None = None,
        hosts: HostPlan | None = None,
    ) -> None:
        self.failed: Worker | None = None  # the first worker that failed
        self._command, self._num_workers, self._cores_per_worker = command, num_workers, cores_per_worker
        self._grace_seconds, self._gpus, self._hosts = grace_seconds, gpus, hosts
        self._workers: list[Worker] = []
        self._suspended: list[int] = []  # ranks of workers in state T at the first failure
        self._ended: list[int] = []  # ranks of workers that had exited with code 0 before it
        self._is_stopping = False
        self._has_killed = False
        self._kill_at_seconds: float | None = None  # of time.monotonic

    def run(self, outputs: Outputs, signals: StopSignals) -> None:
        """Run the workers until all have ended; after an error, none is left running.

        Args:
            outputs: Receives the lines of the workers.
            signals: The signals that stop the job.

        Raises:
            OSError: If a worker cannot be started.
        """
        with ReservedPorts(self._num_workers if self._hosts is None else 0) as ports:
            try:
                self._start(ports, outputs)
                while self._running():
                    ready = self._wait(outputs, signals)
                    self._forward_output(ready, outputs)
                    self._reap([worker for worker in self._running() if worker.end in ready], outputs, signals)
                    self._stop_if_requested(outputs, signals)
            finally:
                for worker in self._running():
                    worker.kill()
                    worker.reap()
                for worker in self._workers:
                    self._forward_rest(worker, outputs)

    def cause(self) -> str:
        """Return the first failure as a clause."""
        assert self.failed is not None
        if self.failed.code == INTERRUPTED:  # all save and end together; which one got the signal is unknown
            return f"a worker was asked to stop, and all workers stopped with a checkpoint (exit code {INTERRUPTED})"
        stopped, ended = (" and ".join(f"worker {rank}" for rank in ranks) for ranks in (self._suspended, self._ended))
        while_stopped = f" while {stopped} was suspended (state T, as after SIGSTOP)" if stopped else ""
        after_end = f" after {ended} had ended with exit code 0" if ended else ""
        return f"worker {self.failed.rank} {_ending(self.failed.code)}{while_stopped}{after_end}"

    def summary(self) -> list[str]:
        """Return the report: the worker that failed first and the end of its output."""
        assert self.failed is not None
        if self.failed.code == INTERRUPTED:
            return [f"The job ended early: {self.cause()}. The same command resumes it."]
        tail = self.failed.tail
        lines = [f"The job failed: {self.cause()}. It was the first to fail."]
        if self._suspended:
            lines.append("Look first at the suspended worker: the others fail because they wait for it.")
        if self._ended:
            lines.append("A worker that ends early, as by sys.exit(0) in a callback, lets the others wait in vain.")
        return [*lines, _heading_of_tail(self.failed), *(f"  {line.decode(errors='replace')}" for line in tail)]

    def endings(self) -> str:
        """Return a sentence about how the workers ended after a request to stop."""
        lost = [worker for worker in self._workers if worker.code not in (0, INTERRUPTED)]
        if not lost:
            return "All workers exited normally."
        return " ".join(f"Worker {worker.rank} {_ending(worker.code)}." for worker in lost)

    def _start(self, ports: ReservedPorts, outputs: Outputs) -> None:
        available = sorted(os.sched_getaffinity(0))
        addresses: Sequence[str]
        if self._hosts is None:
            addresses, secret, first_rank = ports.addresses, job_secret.new(), 0
        else:  # a new secret would differ from the one on the other hosts
            addresses, secret, first_rank = self._hosts.addresses, "", self._hosts.first_rank
        for local in range(self._num_workers):
            rank = first_rank + local
            worker = Worker(
                rank,
                self._command,
                worker_environment(rank, addresses, self._cores_per_worker, secret, os.environ, self._gpus, first_rank),
                worker_cores(local, self._num_workers, self._cores_per_worker, available),
                keeps_terminal=rank == 0 and outputs.is_terminal,
            )
            self._workers.append(worker)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_running]

    def _open_streams(self) -> list[tuple[Worker, OutputStream]]:
        return [(worker, stream) for worker in self._workers for stream in worker.streams if stream.is_open]

    def _wait(self, outputs: Outputs, signals: StopSignals) -> Mapping[int, int]:
        """Wait for the next event, at most until SIGKILL is due; return the events by file descriptor."""
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        outputs.register(poll)
        for worker in self._running():
            poll.register(worker.end, select.POLLIN)
        for _, stream in self._open_streams():
            # Stopping workers must not wait for a slow reader: they may have to write a checkpoint.
            if self._is_stopping or not outputs.is_full:
                poll.register(stream.descriptor, select.POLLIN)
        kill_at = self._kill_at_seconds
        ready = dict(poll.poll(None if kill_at is None else max(0.0, kill_at - time.monotonic()) * 1000))
        if signals.fileno() in ready:
            signals.read()
        outputs.write_some(ready)
        return ready

    def _forward_output(self, ready: Mapping[int, int], outputs: Outputs) -> None:
        for worker, stream in self._open_streams():
            if stream.descriptor in ready:
                outputs.take(worker, stream, stream.read())

    def _forward_rest(self, worker: Worker, outputs: Outputs) -> None:
        for stream in worker.streams:
            outputs.take(worker, stream, stream.read_rest())

    def _reap(self, ended: Sequence[Worker], outputs: Outputs, signals: StopSignals) -> None:
        for worker in ended:
            worker.reap()
            self._forward_rest(worker, outputs)  # the last lines tell whether it is the cause
        failed = sorted((worker for worker in ended if worker.code != 0), key=_consequence_order)
        if not failed or signals.stop is not None:
            return
        if self.failed is None:
            self._record_first_failure(failed[0])
        elif failed[0].code == -signal.SIGKILL and not self._has_killed:
            self.failed = failed[0]  # killed first, but reaped late: the kernel had to free its memory
        elif self.failed.misses_another and not self._has_killed:
            self.failed = failed[0]  # the cause: all workers raise at once and end in any order

    def _record_first_failure(self, failed: Worker) -> None:
        """Record the first failure and stop the other workers."""
        self.failed = failed
        self._suspended = [worker.rank for worker in self._running() if worker.is_stopped]
        self._ended = [worker.rank for worker in self._workers if not worker.is_running and worker.code == 0]
        if failed.code == INTERRUPTED:
            # The others save the same checkpoint and exit; a signal would interrupt the saving.
            self._stop([], self._grace_seconds)
        elif failed.misses_another and not self._suspended:
            self._stop([], min(SECONDS_AFTER_FAILURE, self._grace_seconds))  # a signal would hide the cause
        else:
            self._stop(self._running(), min(SECONDS_AFTER_FAILURE, self._grace_seconds))

    def _stop_if_requested(self, outputs: Outputs, signals: StopSignals) -> None:
        if signals.stop is not None and not self._is_stopping:
            name = signal.Signals(signals.stop).name
            outputs.say(
                f"{name}: the workers are asked to stop, and killed after {self._grace_seconds:g} s. "
                "Ctrl-C again kills them at once."
            )
            self._stop(self._running(), self._grace_seconds)
        is_late = self._kill_at_seconds is not None and time.monotonic() >= self._kill_at_seconds
        if signals.at_once or is_late:
            self._kill_at_seconds, self._has_killed = None, True
            for worker in self._running():
                worker.kill()

    def _stop(self, workers: Sequence[Worker], seconds: float) -> None:
        """Ask workers to stop, and schedule SIGKILL."""
        self._is_stopping = True
        self._kill_at_seconds = time.monotonic() + seconds
        for worker in workers:
            worker.request_stop()


def _consequence_order(worker: Worker) -> int:
    """Return a sort key for simultaneous failures: causes first, consequences last.

    tfpar sends SIGKILL only after the grace period, and TensorFlow aborts when it loses a peer.
    """
    if worker.code == -signal.SIGKILL:
        return 0
    if worker.misses_another:
        return 3
    return 1 if worker.code < 0 and worker.code != -signal.SIGABRT else 2


def _ending(code: int) -> str:
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"failed with exit code {code}"


def _heading_of_tail(worker: Worker) -> str:
    """Return the line above a worker's last lines, which exclude what it wrote to the terminal itself."""
    number = len(worker.tail)
    if number == 0 and worker.keeps_terminal:
        return f"Worker {worker.rank} wrote nothing to standard error; its output is above."
    if number == 0:
        return f"Worker {worker.rank} has no output."
    last = "The last line" if number == 1 else f"The last {number} lines"
    return f"{last} of {'standard error of ' if worker.keeps_terminal else ''}worker {worker.rank}:"
