"""The output of the workers, each line prefixed with its rank. A slow reader does not block the launcher."""

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

_PENDING_BYTES = 1 << 20  # buffered for a slow reader before workers wait
SECONDS_FOR_SLOW_READER = 1.0


class Sink:
    """Standard output or error of the launcher.

    Lines are buffered and written as fast as the reader accepts them, so that a paused pager does not keep the launcher
    from handling signals and workers.

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
        """Whether all lines are written."""
        return not self._pending

    @property
    def is_full(self) -> bool:
        """Whether the buffer is so full that workers should wait."""
        return len(self._pending) > _PENDING_BYTES

    def write_line(self, line: bytes) -> None:
        """Buffer a line without its line end; it is dropped if a write has failed before."""
        if not self.is_broken:
            # On a terminal, this line may show the chief's progress bar, which is drawn again below.
            start = b"\r\x1b[K" if self.is_terminal else b""
            self._pending += start + line + b"\n"

    def write_some(self, events: int) -> None:
        """Write as much as the descriptor accepts without blocking.

        Args:
            events: The events of the descriptor from `poll`.
        """
        try:
            if events & select.POLLOUT:
                written = os.write(self.descriptor, self._pending[: select.PIPE_BUF])
                del self._pending[:written]
            elif events:  # an error: the reader is gone
                self._break(is_unread=True)
        except BlockingIOError:
            pass  # another process has filled the pipe
        except OSError as error:
            # A full disk does not stop the job; losing the reader does.
            self._break(is_unread=error.errno != errno.ENOSPC)

    def _break(self, is_unread: bool) -> None:
        self.is_broken, self.is_unread = True, is_unread
        self._pending.clear()


class Outputs:
    """Standard output and error of the launcher.

    Args:
        signals: Receives SIGPIPE if the reader is gone.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._out, self._error = self._sinks = (Sink(1), Sink(2))

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return self._out.is_terminal

    @property
    def is_full(self) -> bool:
        """Whether a buffer is so full that workers should wait."""
        return any(sink.is_full for sink in self._sinks)

    def take(self, worker: Worker, stream: OutputStream, lines: Sequence[bytes]) -> None:
        """Write the lines of a worker, prefixed with its rank, and keep the last ones for the summary."""
        if stream.is_error and not tensorflow_log.wants_all(os.environ):
            # Messages from before the worker imports tfpar, which suppresses later ones.
            lines = [line for line in lines if not tensorflow_log.is_startup_message(line.decode(errors="replace"))]
        worker.tail.extend(lines)
        sink = self._error if stream.is_error else self._out
        for line in lines:
            sink.write_line(b"[%d] %s" % (worker.rank, line))

    def say(self, line: str) -> None:
        """Write a line of the launcher."""
        self._error.write_line(f"[launch] {line}".encode())

    def register(self, poll: select.poll) -> None:
        """Register the descriptors with a poll for writing and for errors."""
        for sink in self._sinks:
            if not sink.is_broken:  # without an event, poll still reports errors
                poll.register(sink.descriptor, 0 if sink.is_empty else select.POLLOUT)

    def write_some(self, ready: Mapping[int, int]) -> None:
        """Write as much as the descriptors accept without blocking.

        Args:
            ready: The result of `poll`: events by file descriptor.
        """
        for sink in self._sinks:
            was_broken = sink.is_broken
            sink.write_some(ready.get(sink.descriptor, 0))
            if sink.is_unread:
                self._signals.note(signal.SIGPIPE)
            elif sink.is_broken and not was_broken:
                self.say("The disk below standard output or error is full: the job continues, and its lines are lost.")

    def write_rest(self) -> None:
        """Write all buffered lines, without a time limit or, after a stop signal, for at most a second."""
        stopped_seconds = None
        while any(not sink.is_empty for sink in self._sinks):
            if self._signals.stop is not None:
                stopped_seconds = stopped_seconds or time.monotonic()
                if time.monotonic() > stopped_seconds + SECONDS_FOR_SLOW_READER:
                    return
            poll = select.poll()
            poll.register(self._signals, select.POLLIN)
            self.register(poll)
            ready = dict(poll.poll(None if stopped_seconds is None else SECONDS_FOR_SLOW_READER * 1000))
            if self._signals.fileno() in ready:
                self._signals.read()
            self.write_some(ready)
