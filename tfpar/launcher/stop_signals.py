"""Signals that stop the job."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from types import TracebackType

# `timeout` and similar commands send a signal twice at once; a person's second Ctrl-C comes later.
SECONDS_TO_ASK_AGAIN = 0.5


class StopSignals:
    """Receive SIGINT, SIGTERM and SIGHUP through a file descriptor; ignored signals (`nohup`) stay ignored.

    So a single `poll` can wait for signals, workers and output.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.stop is None
        True
    """

    def __init__(self) -> None:
        self.stop: int | None = None  # the first signal
        self.at_once = False
        self._stop_seconds = 0.0

    def __enter__(self) -> StopSignals:
        self._source, self._wakeup = socket.socketpair()
        self._source.setblocking(False)
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        handled = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._before = {number: signal.signal(number, lambda number, frame: None) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._source.close()
        self._wakeup.close()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a signal has arrived."""
        return self._source.fileno()

    def read(self) -> None:
        """Record the signals that have arrived."""
        with contextlib.suppress(BlockingIOError):
            for number in self._source.recv(64):
                self.note(number)

    def note(self, number: int) -> None:
        """Record a signal: the first stops the job, a later SIGINT kills it at once."""
        now_seconds = time.monotonic()
        if self.stop is None:
            self.stop, self._stop_seconds = number, now_seconds
        elif number == signal.SIGINT and now_seconds > self._stop_seconds + SECONDS_TO_ASK_AGAIN:
            self.at_once = True
