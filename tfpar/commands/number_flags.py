"""Parsers for numeric flags. Unlike `int` and `float`, they refuse non-ASCII digits and underscores (`1_0`)."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # of 64 bits
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,3})?|inf|nan)")


class Integer(flags.IntegerParser):
    """Parse an integer of at most 18 decimal digits.

    Example:
        >>> Integer().parse("12")
        12
    """

    def convert(self, argument: Any) -> int:
        """Convert a flag value."""
        if isinstance(argument, str) and not _INTEGER.fullmatch(argument):
            raise ValueError("no integer")
        return int(argument)


class Number(flags.FloatParser):
    """Parse a decimal number. Commands must refuse `inf` and `nan` themselves.

    Example:
        >>> Number().parse("1.5e3")
        1500.0
    """

    def convert(self, argument: Any) -> float:
        """Convert a flag value."""
        if isinstance(argument, str) and not _NUMBER.fullmatch(argument):
            raise ValueError("no number")
        return float(argument)


def check_within(name: str, value: float, least: float, most: float) -> None:
    """Check that the value of a flag is within `[least, most]`.

    Raises:
        ValueError: If it is out of range or NaN.

    Example:
        >>> check_within("audit", 0, 1, 4096)
        Traceback (most recent call last):
        ValueError: --audit must be at least 1, received 0.
    """
    if not value >= least:
        raise ValueError(f"--{name} must be at least {least:,}, received {value}.")
    if value > most:
        raise ValueError(f"--{name} must be at most {most:,}, received {value}.")
