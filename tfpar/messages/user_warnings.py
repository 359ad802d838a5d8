"""Warnings with the user's own line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)


def warn(message: str) -> None:
    """Warn with the line outside of tfpar that called it, which the user can change.

    Args:
        message: The problem, and the way out.

    Example:
        >>> warn("Your input ran out of data.")
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
