"""The signals with which somebody outside stops the job."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from types import TracebackType

# `timeout` and other commands that start commands send one signal twice; a person needs longer.
SECONDS_TO_ASK_AGAIN = 0.5


class StopSignals:
    """Listens to SIGINT, SIGTERM, and SIGHUP of a closed terminal; one that is to be ignored (`nohup`) stays ignored.

    They arrive through a file descriptor, so that one `poll` waits for them and for everything else.

    Example:
        >>> with StopSignals() as requests:
        ...     requests.stop is None
        True
    """

    def __init__(self) -> None:
        self.stop: int | None = None  # the signal that came first
        self.at_once = False
        self._asked_seconds = 0.0

    def __enter__(self) -> StopSignals:
        self._source, self._wakeup = socket.socketpair()
        self._source.setblocking(False)
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        heard = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._before = {number: signal.signal(number, lambda number, frame: None) for number in heard}
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
        """Return the file descriptor that can be read when a signal has come."""
        return self._source.fileno()

    def read(self) -> None:
        """Take note of the signals that have come."""
        with contextlib.suppress(BlockingIOError):
            for number in self._source.recv(64):
                self.note(number)

    def note(self, number: int) -> None:
        """Take note of one signal: the first asks to stop, a later SIGINT to stop at once.

        Args:
            number: The signal. SIGPIPE says that nobody reads the output any more.
        """
        now_seconds = time.monotonic()
        if self.stop is None:
            self.stop, self._asked_seconds = number, now_seconds
        elif number == signal.SIGINT and now_seconds > self._asked_seconds + SECONDS_TO_ASK_AGAIN:
            self.at_once = True
