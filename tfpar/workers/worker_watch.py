"""The chief's watch over the workers that lend it devices: their loss ends the steps that wait for them.

    worker 1   ping   ping   hangs
    chief      step ─ step ─ step ── silence_seconds ── its connections are shut down, the step fails, WorkerLostError

TensorFlow 2.21 has no time limit for an answer of another process, and the cancellation of a step waits for the answers
of all processes. But the call fails at once when its connections end, as after the death of a process.
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
from tfpar.workers.lost_workers import WorkerLostError, error_of, naming_lost_workers

_SHUT_DOWN_SECONDS = 0.2  # between two passes: gRPC connects again
_NOTICED_SECONDS = 1.0  # TensorFlow may fail before the connection of the heartbeats
_LEAVE_SECONDS = 10.0  # for a call to end after the loss, and then for Python


def leave_in_time() -> None:
    """End the process some seconds from now, whatever it waits for then."""
    faulthandler.dump_traceback_later(_LEAVE_SECONDS, exit=True, file=os.open(os.devnull, os.O_WRONLY))


class WorkerWatch:
    """A thread that notices the loss of other workers, and ends what waits for them.

    Args:
        job: The job, of which this process is the chief.
        connections: The connections of the rendezvous, by rank.
        silence_seconds: The time without a heartbeat after which a worker counts as failed.
    """

    def __init__(
        self, job: tf_config.JobConfig, connections: Mapping[int, socket.socket], silence_seconds: float
    ) -> None:
        of_addresses = {job.addresses[rank]: connection for rank, connection in sorted(connections.items())}
        self._answers = heartbeats.Answers(of_addresses, silence_seconds, _stop)
        self._others = open_sockets.endpoints(job.peers)
        self._own_port = tf_config.split_address(job.addresses[job.rank])[1]
        self._lost = threading.Event()
        self._who = ""
        self._num_calls = 0
        self._has_ended = False
        atexit.register(self._end)
        threading.Thread(target=self._run, name="tfpar-worker-watch", daemon=True).start()

    def error(self, wait_seconds: float = 0.0) -> WorkerLostError | None:
        """Return the error for the loss of workers; None if none is lost.

        Args:
            wait_seconds: How long to wait for a loss.
        """
        return error_of(self._who) if self._lost.wait(wait_seconds) else None

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """End the process if a call inside this context does not end after the loss of a worker.

        Raises:
            WorkerLostError: If a worker is lost already.
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
        """Raise `WorkerLostError` for the loss of a worker inside this context.

        Args:
            user_message: Returns a sentence about an error of the data, None for other errors.
        """
        with self.guarding(), naming_lost_workers(user_message, lambda: self.error(_NOTICED_SECONDS)):
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
                print(f"error: {error_of(self._who)}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(_SHUT_DOWN_SECONDS)

    def _end(self) -> None:
        """Tell the other workers that the job has ended, if without an error."""
        self._has_ended = True
        if self._lost.is_set():
            leave_in_time()  # TensorFlow closes its remote devices at the end, and may wait for the lost one
        elif not hasattr(sys, "last_value"):  # an exception that nothing handled
            self._answers.end()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
