"""Sparse gradients of weights in a trace: the gradient rows of each lookup, as of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.gradients.row_numbers import Sources

Kinds = tuple[tuple[indexed_slices.Kind | None, ...], ...]  # by weight and lookup, none for a dense gradient


def by_lookup(gradient: Any, weight: Any, kinds: Sequence[indexed_slices.Kind | None]) -> Any:
    """Return a gradient as a tuple with the rows of each lookup, as a tensor, or None.

    Args:
        gradient: The gradient of one weight.
        weight: The weight, for a warning where its rows become a tensor.
        kinds: The kinds of its lookups, as far as known.
    """
    lookups = indexed_slices.lookups_of(gradient, weight, kinds)
    if lookups is not None:
        return lookups.rows
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(weight.shape)  # a function hides it
    return gradient


def by_lookups(gradients: Sequence[Any], weights: Sequence[Any], sources: Sources) -> tuple[tuple[Any, ...], Kinds]:
    """Return traced gradients as `by_lookup` does, and the kinds of the lookups of each.

    Args:
        gradients: The gradient of each weight.
        weights: The weights.
        sources: What the tensors of their graph depend on.
    """
    kinds = [indexed_slices.kinds_of(gradient, sources) for gradient in gradients]
    rows = tuple(by_lookup(*arguments) for arguments in zip(gradients, weights, kinds, strict=True))
    pairs = zip(rows, kinds, strict=True)
    return rows, tuple(tuple(of_weight) if isinstance(weight_rows, tuple) else () for weight_rows, of_weight in pairs)
