"""Sparse gradients in a trace: the gradient rows of each lookup in a weight, such as an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.gradients.row_numbers import Sources

Kinds = tuple[tuple[indexed_slices.Kind | None, ...], ...]  # the kind of each lookup in each weight


def _rows_by_lookup(gradient: Any, weight: Any, kinds: Sequence[indexed_slices.Kind | None]) -> Any:
    lookups = indexed_slices.lookups_of(gradient, weight, kinds)
    if lookups is not None:
        return lookups.rows
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(weight.shape)  # unknown after a function call
    return gradient


def rows_by_lookup(gradients: Sequence[Any], weights: Sequence[Any], sources: Sources) -> tuple[tuple[Any, ...], Kinds]:
    """Split sparse gradients into the rows of each lookup.

    Args:
        gradients: The traced gradient of each weight.
        weights: The weights.
        sources: What the tensors of the graph depend on.

    Returns:
        The gradient of each weight: a tensor, a tuple with the rows of each lookup, or None; and the kinds of the
        lookups, empty for the first and last.
    """
    kinds = [indexed_slices.kinds_of(gradient, sources) for gradient in gradients]
    rows = tuple(_rows_by_lookup(*arguments) for arguments in zip(gradients, weights, kinds, strict=True))
    pairs = zip(rows, kinds, strict=True)
    return rows, tuple(tuple(lookup_kinds) if isinstance(gradient, tuple) else () for gradient, lookup_kinds in pairs)
