"""The division of weights over owners, by their bytes. Pure Python, no TensorFlow."""

from __future__ import annotations

import functools

from tfpar.reduction.weight_division import largest_first


@functools.lru_cache(maxsize=4096)
def owned(variable_bytes: tuple[int, ...], num_owners: int) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of the weights of each owner, the largest first.

    Args:
        variable_bytes: Bytes of each weight.
        num_owners: Number of owners.

    Example:
        >>> owned((4, 400, 200, 200), 2)
        ((400, 4), (200, 200))
    """
    found: list[list[int]] = [[] for _ in range(num_owners)]
    for size, owner in zip(variable_bytes, largest_first(variable_bytes, num_owners), strict=True):
        found[owner].append(size)
    return tuple(tuple(sorted(one, reverse=True)) for one in found)


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
