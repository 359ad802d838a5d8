"""Ctrl-C and SIGTERM while a training runs: finish the step, write a checkpoint, stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

REPEATED_SECONDS = 0.5


class Interruptible(Protocol):
    """A trainer, or anything else that stops after its current step when it is asked to."""

    def interrupt(self) -> None:
        """Stop after the current step."""


@contextlib.contextmanager
def interruptible(trainer: Interruptible) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end `fit` after its step, with a checkpoint; a second Ctrl-C ends it at once.

    Over several workers a signal to one stops all at the same step. SIGTERM may come several times: batch systems send
    it to every process, and so does the launcher. Works in the main thread, as all of Python's signal handlers.

    Args:
        trainer: Its `interrupted` says afterwards whether the training was cut short.

    Example:
        >>> with tfpar.interruptible(trainer):
        ...     trainer.fit(dataset, epochs=5, checkpoints=tfpar.Checkpoints("checkpoints"))
        >>> if trainer.interrupted:
        ...     raise SystemExit(130)
    """
    asked_at: list[float] = []

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGINT and asked_at and time.monotonic() - asked_at[0] > REPEATED_SECONDS:
            raise KeyboardInterrupt
        if not asked_at:
            print("\nStopping after this step; Ctrl-C once more stops at once.", file=sys.stderr)
            asked_at.append(time.monotonic())
        trainer.interrupt()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
