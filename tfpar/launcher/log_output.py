"""What workers write, on its way out: each line with its rank, and nothing waits for a slow reader."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

from tfpar.launcher.stop_signals import StopSignals
from tfpar.launcher.worker import OutputStream, Worker
from tfpar.messages import tensorflow_log

_PENDING_BYTES = 1 << 20  # about as much as waits for a slow reader
SECONDS_FOR_SLOW_READER = 1.0


class Sink:
    """Standard output or error of the launcher.

    Whole lines go in; they are written as fast as the reader takes them, and no faster. So a pager that stands still
    cannot keep the launcher from its signals and its workers.

    Args:
        descriptor: The file descriptor to write to.

    Example:
        >>> Sink(1).is_empty
        True
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.is_broken = False
        self.is_unread = False
        self._pending = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether all is written."""
        return not self._pending

    @property
    def is_full(self) -> bool:
        """Whether the reader is so far behind that workers should wait."""
        return len(self._pending) > _PENDING_BYTES

    def write_line(self, line: bytes) -> None:
        """Take a line, without its end; nothing once writing has failed."""
        if not self.is_broken:
            # On a terminal the chief's progress bar may stand on this line. It draws itself anew below.
            start = b"\r\x1b[K" if self.is_terminal else b""
            self._pending += start + line + b"\n"

    def write_some(self, events: int) -> None:
        """Write as much as surely fits.

        Args:
            events: What `poll` told of the descriptor.
        """
        try:
            if events & select.POLLOUT:
                written = os.write(self.descriptor, self._pending[: select.PIPE_BUF])
                del self._pending[:written]
            elif events:  # an error: nobody reads any more
                self._break(is_unread=True)
        except BlockingIOError:
            pass  # somebody else who writes there was faster
        except OSError as error:
            # A full disk below a log file is no reason to stop a job; a reader that is gone is a request to.
            self._break(is_unread=error.errno != errno.ENOSPC)

    def _break(self, is_unread: bool) -> None:
        self.is_broken, self.is_unread = True, is_unread
        self._pending.clear()


class Outputs:
    """Standard output and error of the launcher together, where workers' lines carry their rank.

    Args:
        requests: What hears of it, as SIGPIPE, when nobody reads any more.
    """

    def __init__(self, requests: StopSignals) -> None:
        self._requests = requests
        self._out, self._error = self._sinks = (Sink(1), Sink(2))

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return self._out.is_terminal

    @property
    def is_full(self) -> bool:
        """Whether a reader is so far behind that workers should wait."""
        return any(sink.is_full for sink in self._sinks)

    def take(self, worker: Worker, stream: OutputStream, lines: Sequence[bytes]) -> None:
        """Take lines of a worker, and keep the last for the summary."""
        if stream.is_error and not tensorflow_log.wants_all(os.environ):
            # What a worker writes before tfpar is imported in it.
            lines = [line for line in lines if not tensorflow_log.is_startup_message(line.decode(errors="replace"))]
        worker.tail.extend(lines)
        sink = self._error if stream.is_error else self._out
        for line in lines:
            sink.write_line(b"[%d] %s" % (worker.rank, line))

    def say(self, line: str) -> None:
        """Take a line of the launcher's own."""
        self._error.write_line(f"[launch] {line}".encode())

    def register(self, poll: select.poll) -> None:
        """Let a poll wait until something can be written or nobody reads any more."""
        for sink in self._sinks:
            if not sink.is_broken:  # without an event, poll still tells of errors
                poll.register(sink.descriptor, 0 if sink.is_empty else select.POLLOUT)

    def write_some(self, ready: Mapping[int, int]) -> None:
        """Write as much as surely fits.

        Args:
            ready: What the poll told: events by file descriptor.
        """
        for sink in self._sinks:
            was_broken = sink.is_broken
            sink.write_some(ready.get(sink.descriptor, 0))
            if sink.is_unread:
                self._requests.note(signal.SIGPIPE)
            elif sink.is_broken and not was_broken:
                self.say("The disk below standard output or error is full: the job continues, and its lines are lost.")

    def write_rest(self) -> None:
        """Write what is pending, however long that takes; once the job was asked to stop, only for a moment."""
        asked_seconds = None
        while any(not sink.is_empty for sink in self._sinks):
            if self._requests.stop is not None:
                asked_seconds = asked_seconds or time.monotonic()
                if time.monotonic() > asked_seconds + SECONDS_FOR_SLOW_READER:
                    return
            poll = select.poll()
            poll.register(self._requests, select.POLLIN)
            self.register(poll)
            ready = dict(poll.poll(None if asked_seconds is None else SECONDS_FOR_SLOW_READER * 1000))
            if self._requests.fileno() in ready:
                self._requests.read()
            self.write_some(ready)
