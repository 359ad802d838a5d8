"""How far measured seconds vary, relative to them. Pure Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def of_repeats(seconds: Sequence[float]) -> float:
    """Return how far repeats differ: half of the distance of the quartiles, relative to the lower one.

    The lower quartile is what counts as their time, since other programs only make them longer. The difference is not
    divided by the square root of their number: other programs disturb repeats that follow each other alike, so that
    more of them do not make their time more certain.

    Args:
        seconds: Measurements, at least two.

    Example:
        >>> round(of_repeats([1.0, 1.1, 1.2, 1.3]), 3), of_repeats([1, 1, 1, 1, 3, 3, 3, 3])
        (0.07, 1.0)
    """
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / low if low else 0.0


def between(first: float, last: float) -> float:
    """Return how much longer the longer of two measurements of the same work is.

    Args:
        first: Seconds of one measurement.
        last: Seconds of the other.

    Example:
        >>> between(2.0, 2.5), between(2.5, 2.0), between(0.0, 0.0)
        (0.25, 0.25, 0.0)
    """
    short, long = sorted((first, last))
    return long / short - 1 if short > 0 else 0.0


def low(seconds: Sequence[float]) -> float:
    """Return the lower quartile of repeats, since other programs only make them longer.

    Args:
        seconds: Measurements, at least one.

    Example:
        >>> low([1.0, 1.0, 1.0, 1.5, 3.0]), low([2.0])
        (1.0, 2.0)
    """
    if len(seconds) == 1:
        return seconds[0]
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]
