"""Arguments that count something."""

from __future__ import annotations

import operator
from typing import Any

from tfpar.messages.received import quoted


def check_whole_numbers(**values: Any) -> None:
    """Refuse arguments that are no whole numbers.

    Args:
        **values: Arguments by name; NumPy's integers are whole numbers, 2.0 is none, as in Python's `range`.

    Raises:
        TypeError: If one is something else.

    Example:
        >>> check_whole_numbers(epochs=3)
        >>> check_whole_numbers(epochs="3")
        Traceback (most recent call last):
        TypeError: epochs must be a whole number, received '3'.
    """
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be a whole number, received {quoted(value)}.") from None
