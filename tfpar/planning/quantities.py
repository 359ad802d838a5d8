"""Durations and sizes as short text. Pure Python."""

from __future__ import annotations

from tfpar.messages.number_format import three_digits

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def duration(seconds: float) -> str:
    """Return a duration in seconds, milliseconds or microseconds, with three digits.

    Args:
        seconds: The duration, at least 0.

    Example:
        >>> duration(12.3), duration(0.2118), duration(0.00004)
        ('12.3 s', '212 ms', '40.0 us')
    """
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{three_digits(1e3 * seconds)} ms"
    return f"{three_digits(1e6 * seconds)} us"


def memory(num_bytes: float) -> str:
    """Return a size in the largest decimal unit that it reaches, with three digits.

    Args:
        num_bytes: The size, at least 0.

    Example:
        >>> memory(14_100_000_000), memory(475e6), memory(12)
        ('14.1 GB', '475 MB', '12 B')
    """
    size, unit = next((one for one in _SIZES if num_bytes >= one[0]), _SIZES[-1])
    return f"{num_bytes:.0f} B" if unit == "B" else f"{three_digits(num_bytes / size)} {unit}"
