"""How the values of the parts of a batch relate to the value of the whole batch.

    whole   [1 2 3 4]   parts [1 2] [3 4]   joined: the concatenated values of the parts
    whole   2.5         parts 1.5, 3.5      mean, weighted by the sizes of the parts
    whole   10          parts 3, 7          sum
    whole   7           parts 7, 7          equal, and so a mean

Several relations can hold at once, as for zero. Those that hold for other examples and weights too remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

Relation = Literal["joined", "equal", "mean", "sum"]
Relations = frozenset[Relation]

ANY: Relations = frozenset(("joined", "equal", "mean", "sum"))
# Relative to the largest value, by the bytes of the dtype: about the square root of its precision. Float64 layers may
# compute in float32 inside, as rotary embeddings and some kernels do.
_TOLERANCES = {1: 0.5, 2: 0.1, 4: 3e-4, 8: 1e-5}
_ROUNDING = 1e-6  # relative to the largest part: parts may cancel


def relations(whole: np.ndarray, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> Relations:
    """Return the relations of the values of parts to those of the whole batch.

    Args:
        whole: The values for all examples, of any shape.
        parts: The values for each part of these examples.
        sizes: The number of examples in each part.

    Example:
        >>> sorted(relations(np.array(2.5), [np.array(1.0), np.array(3.0)], sizes=[1, 3]))
        ['mean']
    """
    holding: set[Relation] = {"joined"} if is_joined(whole, parts) and _is_proportional(whole, parts, sizes) else set()
    if any(part.shape != whole.shape for part in parts):
        return frozenset(holding)
    if not _decides(whole, parts):
        return ANY
    if all(close(part, whole) for part in parts):
        holding.add("equal")
    if _is_text(whole):
        return frozenset(holding)
    numbers = np.stack([_float(part) for part in parts])
    largest = float(np.max(np.abs(numbers), initial=0.0))
    if close(np.average(numbers, axis=0, weights=sizes), whole, largest):
        holding.add("mean")
    if close(numbers.sum(axis=0), whole, largest):
        holding.add("sum")
    return frozenset(holding)


def is_joined(whole: np.ndarray, parts: Sequence[np.ndarray]) -> bool:
    """Return whether the values of the parts, concatenated, are those of the whole batch.

    Args:
        whole: The values for all examples, `[rows, ...]`.
        parts: The values for each part.

    Example:
        >>> is_joined(np.array([1.0, 2.0]), [np.array([1.0]), np.array([2.5])])
        False
    """
    if not whole.ndim or any(part.ndim != whole.ndim or part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    return close(np.concatenate(parts, axis=0), whole)


def is_joined_elsewhere(whole: np.ndarray, parts: Sequence[np.ndarray]) -> bool:
    """Return whether the values of the parts are those of the whole batch if joined along an axis other than the first.

    Example:
        >>> is_joined_elsewhere(np.array([[1.0, 2.0]]), [np.array([[1.0]]), np.array([[2.0]])])
        True
    """
    axes = [axis for axis in range(1, whole.ndim) if sum(part.shape[axis] for part in parts) == whole.shape[axis]]
    first = (np.moveaxis(whole, axis, 0) for axis in axes)
    return any(
        is_joined(moved, [np.moveaxis(part, axis, 0) for part in parts])
        for axis, moved in zip(axes, first, strict=True)
    )


def common_relations(runs: Iterable[Relations]) -> Relations:
    """Return the relations that hold in all runs.

    Example:
        >>> sorted(common_relations([frozenset(["mean", "equal"]), frozenset(["mean", "sum"])]))
        ['mean']
    """
    return frozenset.intersection(ANY, *runs)


def close(values: Any, other: np.ndarray, largest_part: float = 0.0) -> bool:
    """Return whether two arrays have the same shape, and values that are equal up to rounding.

    Args:
        values: An array or a number.
        other: An array, whose dtype decides the tolerance.
        largest_part: The largest value of a part if `values` is the sum or mean of parts.
    """
    if np.shape(values) != other.shape:
        return False
    if not _is_floating(other):
        return bool(np.array_equal(values, other))
    tolerance, values, other = _TOLERANCES[other.dtype.itemsize], _float(values), _float(other)
    largest = float(np.max(np.abs(np.where(np.isfinite(other), other, 0.0)), initial=0.0))
    atol = max(tolerance * largest, _ROUNDING * largest_part)
    return bool(np.allclose(values, other, rtol=tolerance, atol=atol, equal_nan=True))


def _decides(whole: np.ndarray, parts: Sequence[np.ndarray]) -> bool:
    """Return whether values can show a relation: they are finite, and not all zero."""
    if _is_text(whole):
        return True
    return bool(np.isfinite(_float(whole)).all() and any(np.any(value) for value in (whole, *parts)))


def _is_text(values: np.ndarray) -> bool:
    return values.dtype.kind in "OSU"


def _is_proportional(whole: np.ndarray, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> bool:
    """Return whether every example has equally many values."""
    return all(part.size * sum(sizes) == whole.size * size for part, size in zip(parts, sizes, strict=True))


def _is_floating(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" or values.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _float(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.float64)
