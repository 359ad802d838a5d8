"""Ctrl-C and SIGTERM, after which training stops with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, NoReturn, Protocol

from tfpar.commands.start_up import INTERRUPTED

REPEATED_SECONDS = 0.5
_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Interruptible(Protocol):
    """A trainer, or any object that can stop after its current step."""

    def interrupt(self) -> None:
        """Stop after the current step."""


def unhandled() -> list[signal.Signals]:
    """Return those of SIGINT and SIGTERM that the program does not handle; none outside of the main thread.

    Example:
        >>> signal.SIGTERM in unhandled()
        True
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number, default in _DEFAULTS.items() if signal.getsignal(number) is default]


@contextlib.contextmanager
def interruptible(
    trainer: Interruptible, numbers: Collection[signal.Signals] = tuple(_DEFAULTS)
) -> Iterator[list[int]]:
    """Stop `fit` after its step, with a checkpoint, on Ctrl-C or SIGTERM; stop at once on a second Ctrl-C.

    A signal to one worker stops all workers after the same step. Repeated SIGTERM is ignored, as batch systems and the
    launcher send it to every process. The context must be entered in the main thread.

    Args:
        trainer: The trainer; its attribute `interrupted` is then True.
        numbers: The signals to handle.

    Returns:
        The signals that this process receives, in a list that grows.

    Example:
        >>> with interruptible(trainer):
        ...     trainer.fit(dataset, epochs=5, checkpoints=tfpar.Checkpoints("checkpoints"))
    """
    signals: list[int] = []
    first_seconds = 0.0

    def stop(number: int, frame: Any) -> None:
        nonlocal first_seconds
        if number == signal.SIGINT and signals and time.monotonic() - first_seconds > REPEATED_SECONDS:
            raise KeyboardInterrupt
        if not signals:
            print("\nStopping after this step; press Ctrl-C again to stop at once.", file=sys.stderr)
            first_seconds = time.monotonic()
        signals.append(number)
        trainer.interrupt()

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(signals: Collection[int]) -> NoReturn:
    """End an interrupted `fit` once its checkpoint is written.

    Args:
        signals: The signals that this process has received; empty if another worker was interrupted.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
        SystemExit: With code 130, after SIGTERM or a signal to another worker.
    """
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    raise SystemExit(INTERRUPTED)
