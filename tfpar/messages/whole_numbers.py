"""A check of arguments that must be whole numbers."""

from __future__ import annotations

import operator
from typing import Any

from tfpar.messages.received import quoted


def check_whole_number(name: str, value: Any) -> None:
    """Raise an error if an argument is not a whole number. As for `range`, NumPy integers are; 2.0 is not.

    Args:
        name: The name of the argument.
        value: Its value.

    Raises:
        TypeError: If it is not a whole number.

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
