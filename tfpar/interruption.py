"""Interrupts by Ctrl-C and SIGTERM: training stops after its step, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

REPEATED_SECONDS = 0.5


class Interruptible(Protocol):
    """A trainer, or another object that can stop after its current step."""

    def interrupt(self) -> None:
        """Stop after the current step."""


@contextlib.contextmanager
def interruptible(trainer: Interruptible) -> Iterator[None]:
    """Stop `fit` after its step, with a checkpoint, on Ctrl-C or SIGTERM; stop at once on a second Ctrl-C.

    A signal to one of several workers stops all of them after the same step. SIGTERM may arrive several times: batch
    systems and the launcher send it to every process. As all signal handlers of Python, it works in the main thread
    only.

    Args:
        trainer: The trainer. After the context, its attribute `interrupted` tells whether it was interrupted.

    Example:
        >>> with tfpar.interruptible(trainer):
        ...     trainer.fit(dataset, epochs=5, checkpoints=tfpar.Checkpoints("checkpoints"))
        >>> if trainer.interrupted:
        ...     raise SystemExit(130)
    """
    times: list[float] = []

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGINT and times and time.monotonic() - times[0] > REPEATED_SECONDS:
            raise KeyboardInterrupt
        if not times:
            print("\nStopping after this step; press Ctrl-C again to stop at once.", file=sys.stderr)
            times.append(time.monotonic())
        trainer.interrupt()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
