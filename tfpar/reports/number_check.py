"""A check for numbers in recorded files."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number and not a boolean.

    Example:
        >>> is_number(1.5), is_number(True), is_number("1")
        (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)
