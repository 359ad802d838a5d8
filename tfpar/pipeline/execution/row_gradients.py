"""The gradients of rows of a weight for each lookup, and their sum over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.reduction import indexed_slices
from tfpar.reduction.gradient_addition import reached_from

Kinds = tuple[tuple[indexed_slices.Kind | None, ...], ...]  # by weight and lookup


def by_lookup(gradient: Any) -> Any:
    """Return the rows of each lookup of an IndexedSlices gradient, during a trace; a dense gradient as it is."""
    return tuple(indexed_slices.split_lookups(gradient)) if isinstance(gradient, tf.IndexedSlices) else gradient


def known_kinds(graph: Any, gradients: Sequence[Any], given: Sequence[tf.Tensor]) -> Kinds:
    """Return the kinds of the lookups of each gradient, None for one that the graph does not determine.

    Args:
        graph: The traced graph.
        gradients: As `by_lookup` returns them.
        given: Tensors that differ between micro-batches.
    """
    # Lookups of positions do not depend on the examples; random numbers differ between micro-batches.
    drawn = [tensor for op in graph.get_operations() if op.op_def.is_stateful for tensor in op.outputs]
    varying = reached_from([*given, *drawn])
    return tuple(
        tuple(indexed_slices.known_kind(rows.indices) if rows.indices.op in varying else "equal" for rows in gradient)
        if isinstance(gradient, tuple)
        else ()
        for gradient in gradients
    )


def numbered(gradient: Any, kinds: Sequence[indexed_slices.Kind | None]) -> Any:
    """Return a micro-batch's gradient, with the rows of shared lookups numbered for their later merge."""
    if not kinds:
        return gradient
    return tuple(
        indexed_slices.numbered(rows) if kind == "shared" else rows for rows, kind in zip(gradient, kinds, strict=True)
    )


def add_rows(
    before: Sequence[indexed_slices.RowSlices],
    now: Sequence[indexed_slices.RowSlices],
    kinds: Sequence[indexed_slices.Kind | None],
) -> Any:
    """Add the rows of each lookup of a micro-batch to those of earlier micro-batches.

    Args:
        before: The sums over earlier micro-batches, one for each lookup.
        now: The rows of the micro-batch, for each lookup.
        kinds: The kind of each lookup. Shared rows are merged after the last micro-batch.
    """
    return tuple(
        one._replace(values=one.values + other.values)
        if kind == "equal"
        else one._replace(
            values=tf.concat([one.values, other.values], 0), indices=tf.concat([one.indices, other.indices], 0)
        )
        for one, other, kind in zip(before, now, kinds, strict=True)
    )


def joined(
    gradients: Sequence[Any], kinds: Sequence[Sequence[indexed_slices.Kind | None]], weights: Sequence[keras.Variable]
) -> list[Any]:
    """Return summed gradients of weights as tensors, slices or None, as one device has them."""
    return [
        join_rows(gradient, of_one, weight.shape) if of_one else gradient
        for gradient, of_one, weight in zip(gradients, kinds, weights, strict=True)
    ]


def join_rows(
    lookups: Sequence[indexed_slices.RowSlices], kinds: Sequence[indexed_slices.Kind | None], shape: Sequence[int]
) -> tf.IndexedSlices:
    """Return one gradient for the rows of several lookups; shared rows are merged as on one device."""
    pairs = zip(lookups, kinds, strict=True)
    merged = [indexed_slices.merged(rows) if kind == "shared" else rows for rows, kind in pairs]
    return indexed_slices.join(
        [rows._replace(indices=tf.cast(rows.indices, tf.int64)) for rows in merged],
        tf.constant(tuple(shape), tf.int64),
    )
