"""Startup of the commands: standard streams, and Ctrl-C during imports.

A KeyboardInterrupt during an import ends in a traceback or leaves a module half imported. So Ctrl-C ends the process at
once until all modules are imported: there is nothing to save yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_MODULES = ("tfpar", "tfpar.train", "tfpar.launch", "tfpar.doctor", "tfpar.plan")
_SCRIPTS = ("tfpar-train", "tfpar-launch", "tfpar-doctor", "tfpar-plan")


def is_command() -> bool:
    """Return whether this process runs a command of tfpar, with `python -m` or as an installed script."""
    if sys.argv[:1] == ["-m"]:  # Python's placeholder until it has located the module
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") in _MODULES
    return bool(sys.argv) and os.path.basename(sys.argv[0]) in _SCRIPTS


def begin() -> None:
    """Prepare a command for its imports. It does nothing in other processes."""
    if is_command():
        _open_closed_streams()
        # Importing TensorFlow redirects file descriptor 2.
        _terminal.append(os.dup(2))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)


def _open_closed_streams() -> None:
    """Open `/dev/null` in place of closed standard streams (`>&-`).

    Otherwise the next opened file, such as a checkpoint, would get the descriptor to which native code writes errors.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def imported() -> None:
    """Raise KeyboardInterrupt on Ctrl-C again, after the imports."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ended() -> None:
    """Make Ctrl-C end the process without a traceback, after the work is done."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Make Ctrl-C end the process at once in this context, instead of raising KeyboardInterrupt.

    Example:
        >>> with importing():
        ...     import tensorflow as tf
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(_terminal[-1], b"Interrupted.\n")
    os._exit(INTERRUPTED)


_terminal = [2]  # descriptors of standard error
