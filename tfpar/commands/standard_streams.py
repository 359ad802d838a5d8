"""Standard output and error of a command where they are closed, full or without a reader.

    closed (`>&-`)             nothing is written, and no other file takes the place of the descriptor
    no reader (`| head -1`)    the command ends with exit code 141; a training first finishes its step and saves
    full, or gone              the command ends with a sentence; a training continues without its output

Messages that cannot be written to standard error are lost. The library does not change the streams; the commands of
tfpar call `install`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

UNREAD = 141  # 128 + SIGPIPE, as shells report it


def open_closed() -> None:
    """Open `/dev/null` for each of the three standard streams that is closed.

    Otherwise the next opened file, such as a checkpoint, gets the descriptor to which native code writes its errors.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this one
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or _writer(1)
    sys.stderr = sys.stderr or _writer(2)


def _writer(descriptor: int) -> Any:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


class UnwritableError(OSError):
    """Standard output cannot be written, and the command has nothing else to do; the message is whole sentences."""


class SafeStream:
    """A text stream that calls `failed` at the first failure instead of raising, and drops all text after it.

    Args:
        stream: Standard output or standard error.
        failed: Called once, with the first error.

    Example:
        >>> sys.stderr = SafeStream(sys.stderr, failed=ignore)
    """

    def __init__(self, stream: Any, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        self.error_number: int | None = None  # of the first error; the error itself would keep all its callers alive

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._attempt(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts, or drop them."""
        self._attempt(self._stream.writelines, lines)

    def flush(self) -> None:
        """Write the buffered text, or drop it."""
        self._attempt(self._stream.flush)

    def close(self) -> None:
        """Write the buffered text, or drop it, and close the stream."""
        self.flush()
        self._attempt(self._stream.close)

    def _attempt(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except OSError as error:
            if self.error_number is not None:
                return
            self.error_number = error.errno
            self._drop()
            self._failed(error)

    def _drop(self) -> None:
        """Redirect the descriptor to /dev/null, so that buffered text and native code's output do not fail again."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self._stream.fileno())
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Policy:
    """The reaction of a command to a standard output that cannot be written."""

    def __init__(self) -> None:
        self.outlives = False
        self.interrupt: Callable[[], None] | None = None

    def __call__(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:
            self._unread()
        elif self.outlives:
            print(f"warning: {_sentence(error)} The run continues without its output.", file=sys.stderr)
        else:
            raise UnwritableError(f"{_sentence(error)} Free some space there, or redirect the output to another file.")

    def _unread(self) -> None:
        if self.interrupt is None:
            raise SystemExit(UNREAD)
        self.interrupt()


_policy = _Policy()


def _sentence(error: OSError) -> str:
    return f"Standard output must be writable, and it is not: {os.strerror(error.errno or 0)}."


def ignore(error: OSError) -> None:
    """Ignore a failure to write to standard error: `failed` of its `SafeStream`."""


def install() -> None:
    """Take over standard output and error of a command, once. Characters that they cannot encode are escaped."""
    open_closed()
    for name, failed in (("stdout", _policy), ("stderr", ignore)):
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, SafeStream(stream, failed))


def unread() -> bool:
    """Return whether standard output has lost its reader."""
    return getattr(sys.stdout, "error_number", None) == errno.EPIPE


@contextlib.contextmanager
def outlived(interrupt: Callable[[], None] | None = None) -> Iterator[None]:
    """Continue a run inside this context when its output cannot be written.

    Args:
        interrupt: Called when the reader of the output has closed it; None ends the command.

    Example:
        >>> with outlived(trainer.interrupt):
        ...     trainer.fit(dataset)
    """
    before = _policy.outlives, _policy.interrupt
    _policy.outlives, _policy.interrupt = True, interrupt
    try:
        yield
        sys.stdout.flush()  # here, where a failure does no harm
    finally:
        _policy.outlives, _policy.interrupt = before
