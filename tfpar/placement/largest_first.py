"""Divide weights evenly over owners. Pure Python, for plans before TensorFlow starts."""

from __future__ import annotations

from collections.abc import Sequence


def largest_first(num_bytes: Sequence[int], num_owners: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign weights to owners: the largest first, each to the owner with the fewest bytes.

    No owner has more than 4/3 of the bytes of the best division (Graham, "Bounds on Multiprocessing Timing Anomalies",
    1969).

    Args:
        num_bytes: The size of each weight.
        num_owners: The number of owners.
        loads: The bytes that each owner has already; none by default.

    Returns:
        The owner of each weight, from 0; the same in every process.

    Example:
        >>> largest_first([4, 400, 200, 200], num_owners=2)
        [0, 0, 1, 1]
    """
    owners, totals = [0] * len(num_bytes), list(loads or [0] * num_owners)
    for weight in sorted(range(len(num_bytes)), key=num_bytes.__getitem__, reverse=True):
        owners[weight] = min(range(num_owners), key=totals.__getitem__)
        totals[owners[weight]] += num_bytes[weight]
    return owners
