"""The check that a value of a recorded file is a number."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a number, and no truth value.

    Args:
        value: Any value that JSON has.

    Example:
        >>> is_number(1.5), is_number(True), is_number("1")
        (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)
