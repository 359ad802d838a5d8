"""Flags that are quantities: sizes such as 24GiB, and bandwidths such as 10GB/s or 25Gbit/s."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?((?:[KMGT]i|[kKMGT])?)(B|bit)(/s)?")


class Size(flags.ArgumentParser[int]):
    """Takes a size in bytes: a number and a unit, such as 24GiB, 24GB, 512MiB or 4096B.

    Example:
        >>> Size().parse("512MiB"), Size().parse("1.5 GB")
        (536870912, 1500000000)
    """

    syntactic_help = "a size above 0, such as 24GiB or 512MB"

    def parse(self, argument: Any) -> int:
        """Return the number of bytes that a text means."""
        return round(_quantity(argument, per_second=False))

    def flag_type(self) -> str:
        """Return the name of the type."""
        return "size"


class Bandwidth(flags.ArgumentParser[float]):
    """Takes a bandwidth: a number and a unit, in bytes or bits per second, such as 10GB/s or 25Gbit/s.

    Example:
        >>> Bandwidth().parse("10GB/s"), Bandwidth().parse("1Gbit/s")
        (10000000000.0, 125000000.0)
    """

    syntactic_help = "a bandwidth above 0, such as 10GB/s or 25Gbit/s"

    def parse(self, argument: Any) -> float:
        """Return the bytes per second that a text means."""
        return _quantity(argument, per_second=True)

    def flag_type(self) -> str:
        """Return the name of the type."""
        return "bandwidth"


def _quantity(argument: Any, *, per_second: bool) -> float:
    """Return the bytes, or bytes per second, of a number with a unit."""
    if isinstance(argument, int | float):
        return argument
    found = _QUANTITY.fullmatch(argument)
    if found is None or bool(found[4]) != per_second or (found[3] == "bit" and not per_second):
        raise ValueError("no quantity")
    value = float(found[1]) * (_PREFIXES | _BINARY)[found[2]] / (8 if found[3] == "bit" else 1)
    if value < 1:
        raise ValueError("below a byte")
    return value
