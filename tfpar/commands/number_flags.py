"""Flags that are numbers: decimal digits only, where `int` and `float` also take other scripts' digits and `1_0`."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # of 64 bits
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,3})?|inf|nan)")


class Integer(flags.IntegerParser):
    """Takes an integer of at most 18 decimal digits.

    Example:
        >>> Integer().parse("12")
        12
    """

    def convert(self, argument: Any) -> int:
        """Return the number that a text means."""
        if isinstance(argument, str) and not _INTEGER.fullmatch(argument):
            raise ValueError("no integer")
        return int(argument)


class Number(flags.FloatParser):
    """Takes a number in decimal digits; `inf` and `nan` are left to the command to refuse.

    Example:
        >>> Number().parse("1.5e3")
        1500.0
    """

    def convert(self, argument: Any) -> float:
        """Return the number that a text means."""
        if isinstance(argument, str) and not _NUMBER.fullmatch(argument):
            raise ValueError("no number")
        return float(argument)


def check_within(name: str, value: float, least: float, most: float) -> None:
    """Refuse the value of a flag that is out of range, or no number.

    Args:
        name: Of the flag.
        value: The value of the flag.
        least: The smallest value.
        most: The largest value.

    Raises:
        ValueError: If it is out of range.

    Example:
        >>> check_within("audit", 0, 1, 4096)
        Traceback (most recent call last):
        ValueError: --audit must be at least 1, received 0.
    """
    if not value >= least:
        raise ValueError(f"--{name} must be at least {least:,}, received {value}.")
    if value > most:
        raise ValueError(f"--{name} must be at most {most:,}, received {value}.")
