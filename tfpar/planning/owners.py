"""The division of weights over owners, by their bytes. Pure Python, no TensorFlow."""

from __future__ import annotations

import functools
import heapq


@functools.lru_cache(maxsize=4096)
def owned(variable_bytes: tuple[int, ...], num_owners: int) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of the weights of each owner, as `tfpar.reduction.weight_owners` divides them.

    Each weight has one owner; the largest are assigned first, each to the owner with the fewest bytes.

    Args:
        variable_bytes: Bytes of each weight.
        num_owners: Number of owners.

    Example:
        >>> owned((4, 400, 200, 200), 2)
        ((400, 4), (200, 200))
    """
    found: list[list[int]] = [[] for _ in range(num_owners)]
    loads = [(0, number) for number in range(num_owners)]
    for size in sorted(variable_bytes, reverse=True):
        load, number = loads[0]
        found[number].append(size)
        heapq.heapreplace(loads, (load + size, number))
    return tuple(map(tuple, found))


def shares(variable_bytes: tuple[int, ...], num_owners: int) -> list[float]:
    """Return the part of the bytes of each owner; equal parts where the weights are not known.

    Args:
        variable_bytes: Bytes of each weight.
        num_owners: Number of owners.

    Example:
        >>> shares((300, 100), 2), shares((), 2)
        ([0.75, 0.25], [0.5, 0.5])
    """
    total = sum(variable_bytes)
    return [sum(one) / total if total else 1 / num_owners for one in owned(variable_bytes, num_owners)]
