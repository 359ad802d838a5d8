"""Arguments that count something."""

from __future__ import annotations

import operator
from typing import Any

from tfpar.messages.received import quoted


def check_whole_number(name: str, value: Any) -> None:
    """Refuse an argument that is no whole number.

    Args:
        name: Of the argument.
        value: Its value; NumPy's integers are whole numbers, 2.0 is none, as in Python's `range`.

    Raises:
        TypeError: If it is something else.

    Example:
        >>> check_whole_number("epochs", 3)
        >>> check_whole_number("epochs", "3")
        Traceback (most recent call last):
        TypeError: epochs must be a whole number, received '3'.
    """
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, received {quoted(value)}.") from None
