"""Warnings that name the user's own line."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)
_IS_SUPPRESSED = contextvars.ContextVar("is_suppressed", default=False)


@contextlib.contextmanager
def suppressed() -> Iterator[None]:
    """Suppress warnings in this context, such as those about a strategy that only the planner has chosen.

    Example:
        >>> with suppressed():
        ...     warn("No layer is sharded.")
    """
    token = _IS_SUPPRESSED.set(True)
    try:
        yield
    finally:
        _IS_SUPPRESSED.reset(token)


def warn(message: str) -> None:
    """Warn with the last line outside of tfpar, which the user can change.

    Args:
        message: The problem and the way out.

    Example:
        >>> warn("Your input ran out of data.")
    """
    if _IS_SUPPRESSED.get():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
