"""The chief's watch over workers with remote devices: it ends steps that wait for a lost worker.

    worker 1   ping   ping   hangs
    chief      step ─ step ─ step ── silence_seconds ── connections are shut down, the step fails, WorkerLostError

TensorFlow 2.21 waits for other processes without a time limit, and cancelling a step waits for all of them too. But a
call fails at once when its connections are closed, as they are when a process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from tfpar.cluster import heartbeats, open_sockets, tf_config
from tfpar.job import UserMessage
from tfpar.workers.lost_workers import WorkerLostError, lost_worker_error, naming_lost_workers

_SHUT_DOWN_SECONDS = 0.2  # between shutdowns: gRPC reconnects
_DETECTION_SECONDS = 1.0  # TensorFlow may fail before the heartbeats do
_LEAVE_SECONDS = 10.0  # for a call to fail after the loss, and for Python to exit


def leave_in_time() -> None:
    """End the process in a few seconds, whatever it is waiting for."""
    faulthandler.dump_traceback_later(_LEAVE_SECONDS, exit=True, file=os.open(os.devnull, os.O_WRONLY))


class WorkerWatch:
    """A thread that detects lost workers and ends calls that wait for them.

    Args:
        job: The job whose chief this process is.
        connections: The rendezvous connections, by rank.
        silence_seconds: Seconds without a heartbeat after which a worker counts as lost.
    """

    def __init__(
        self, job: tf_config.JobConfig, connections: Mapping[int, socket.socket], silence_seconds: float
    ) -> None:
        by_address = {job.addresses[rank]: connection for rank, connection in sorted(connections.items())}
        self._answers = heartbeats.Answers(by_address, silence_seconds, _stop)
        self._others = open_sockets.endpoints(job.peers)
        self._own_port = tf_config.split_address(job.addresses[job.rank])[1]
        self._lost = threading.Event()
        self._who = ""
        self._num_calls = 0
        self._has_ended = False
        atexit.register(self._end)
        threading.Thread(target=self._run, name="tfpar-worker-watch", daemon=True).start()

    def error(self, wait_seconds: float = 0.0) -> WorkerLostError | None:
        """Return the error for lost workers; None if none is lost within `wait_seconds`."""
        return lost_worker_error(self._who) if self._lost.wait(wait_seconds) else None

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """End the process if a call in this context keeps waiting after a worker was lost.

        Raises:
            WorkerLostError: If a worker is already lost.
        """
        if error := self.error():
            raise error
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    @contextlib.contextmanager
    def reported(self, user_message: UserMessage) -> Iterator[None]:
        """Raise `WorkerLostError` if a worker is lost in this context.

        Args:
            user_message: Returns a sentence about a data error, and None for other errors.
        """
        with self.guarding(), naming_lost_workers(user_message, lambda: self.error(_DETECTION_SECONDS)):
            yield

    def _run(self) -> None:
        addresses, reason = self._answers.first_loss()
        if self._has_ended:
            return
        self._who = f"{', '.join(addresses)} no longer respond{'s' * (len(addresses) == 1)} ({reason})"
        self._lost.set()
        ends_seconds = time.monotonic() + _LEAVE_SECONDS
        while True:
            open_sockets.shut_down(self._own_port, self._others)
            if self._num_calls and time.monotonic() > ends_seconds:
                print(f"error: {lost_worker_error(self._who)}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(_SHUT_DOWN_SECONDS)

    def _end(self) -> None:
        """At exit, tell the other workers that the job has ended, unless it failed."""
        self._has_ended = True
        if self._lost.is_set():
            leave_in_time()  # TensorFlow closes its remote devices at exit, and may wait for the lost worker
        elif not hasattr(sys, "last_value"):  # set by an unhandled exception
            self._answers.end()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
