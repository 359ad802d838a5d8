"""Warnings with the user's own line."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)
_IS_TRIAL = contextvars.ContextVar("is_trial", default=False)


@contextlib.contextmanager
def in_trial() -> Iterator[None]:
    """Leave out the warnings of a trial, whose strategy the user has not chosen, inside this context.

    Example:
        >>> with in_trial():
        ...     warn("No layer is divided.")
    """
    token = _IS_TRIAL.set(True)
    try:
        yield
    finally:
        _IS_TRIAL.reset(token)


def warn(message: str) -> None:
    """Warn with the line outside of tfpar that called it, which the user can change.

    Args:
        message: The problem, and the way out.

    Example:
        >>> warn("Your input ran out of data.")
    """
    if _IS_TRIAL.get():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
