"""The division of weights over replicas, each of which updates its own and holds the optimizer's state for them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. Weights are
never divided: Adafactor, Lamb, Muon and `clipnorm` need whole tensors. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence


def largest_first(num_bytes: Sequence[int], num_owners: int) -> list[int]:
    """Return the owner of each weight: the largest weights first, each to the owner with the fewest bytes.

    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: no owner has more than 4/3 of the bytes of the best
    division.

    Args:
        num_bytes: The size of each weight.
        num_owners: The number of owners.

    Returns:
        A number from 0 for each weight, equal in every process.

    Example:
        >>> largest_first([4, 400, 200, 200], num_owners=2)
        [0, 0, 1, 1]
    """
    owners, loads = [0] * len(num_bytes), [0] * num_owners
    for weight in sorted(range(len(num_bytes)), key=num_bytes.__getitem__, reverse=True):
        owners[weight] = min(range(num_owners), key=loads.__getitem__)
        loads[owners[weight]] += num_bytes[weight]
    return owners
