"""Gradients as TensorFlow gives them: a tensor, indexed slices (of what is looked up, as an embedding), or None."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from tfpar import slices


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Return all tensors in a structure, those of indexed slices too; a None holds none."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, str)]


def dense_part(tensor: Any) -> Any:
    """Return the part of a tensor that a gradient is of: all of it, or the values of a ragged or sparse one."""
    if isinstance(tensor, tf.SparseTensor):
        return tensor.values
    return tensor.flat_values if isinstance(tensor, tf.RaggedTensor) else tensor


def spec_of(tensor: Any) -> tf.TypeSpec:
    """Return the spec of a tensor with any number of rows.

    Args:
        tensor: A tensor, ragged tensor or sparse tensor, or its spec.
    """
    if isinstance(tensor, tf.SparseTensor | tf.SparseTensorSpec):
        known = tensor.shape.rank is not None
        return tf.SparseTensorSpec([None, *tensor.shape[1:]] if known else None, tensor.dtype)
    shape = [None, *tensor.shape[1:]]
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tf.type_spec_from_value(tensor)
    if isinstance(tensor, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, tensor.dtype, tensor.ragged_rank, tensor.row_splits_dtype)
    return tf.TensorSpec(shape, tensor.dtype)


def value_of(structure: Any, known: dict[Any, tf.Tensor]) -> Any:
    """Return a tensor, indexed slices, rows of lookups or None of the traced graph with its tensors' values."""
    if isinstance(structure, tuple):
        return tuple(
            piece._replace(values=known[piece.values.ref()], indices=known[piece.indices.ref()]) for piece in structure
        )
    if isinstance(structure, tf.IndexedSlices):
        parts = (structure.values, structure.indices, structure.dense_shape)
        return tf.IndexedSlices(*(None if part is None else known[part.ref()] for part in parts))
    return None if structure is None else known[structure.ref()]


def by_lookup(gradient: Any) -> Any:
    """Return the rows of each lookup of a gradient of slices, while it is traced; another as it is."""
    return tuple(slices.pieces(gradient)) if isinstance(gradient, tf.IndexedSlices) else gradient


def kinds_of(gradient: Any, varying: Container[tf.Operation]) -> tuple[slices.Kind, ...]:
    """Return what becomes of rows of the same number in several micro-batches, for each lookup; none if it is dense.

    Args:
        gradient: As `by_lookup` returns it.
        varying: What differs from micro-batch to micro-batch.
    """
    if not isinstance(gradient, tuple):
        return ()
    return tuple(piece.kind if piece.indices.op in varying else "alike" for piece in gradient)


def add_rows(before: Sequence[slices.Piece], now: Sequence[slices.Piece], kinds: Sequence[slices.Kind]) -> Any:
    """Add the rows of a micro-batch, lookup by lookup, to those of the ones before.

    Args:
        before: The lookups so far.
        now: Those of the micro-batch.
        kinds: What becomes of rows of the same number; those of one micro-batch and another are merged at the end.
    """
    return tuple(
        one._replace(values=one.values + other.values)
        if kind == "alike"
        else one._replace(
            values=tf.concat([one.values, other.values], 0), indices=tf.concat([one.indices, other.indices], 0)
        )
        for one, other, kind in zip(before, now, kinds, strict=True)
    )


def join_rows(pieces: Sequence[slices.Piece], kinds: Sequence[slices.Kind], shape: Sequence[int]) -> tf.IndexedSlices:
    """Return one gradient of the rows of several lookups, those that one device has once merged."""
    merged = [
        piece._replace(**dict(zip(("values", "indices"), slices.merge(piece.values, piece.indices), strict=True)))
        if kind == "distinct"
        else piece
        for piece, kind in zip(pieces, kinds, strict=True)
    ]
    listed = [piece._replace(indices=tf.cast(piece.indices, tf.int64)) for piece in merged]
    return slices.join(listed, tf.constant(tuple(shape), tf.int64))


def plus(one: Any, other: Any) -> Any:
    """Add two gradients, each a tensor, indexed slices or None; the sum stays sparse where both are.

    Keras' Adam squares slices one by one, also those of the same row; so rows are listed as on one device, where a
    lookup of every example gives one slice each, and a lookup that no example takes part in one slice in all.

    Args:
        one: A gradient.
        other: Of the same weight.
    """
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = [one.indices, other.indices]
        if one.indices.dtype != other.indices.dtype:
            indices = [tf.cast(some, tf.int64) for some in indices]
        return tf.IndexedSlices(tf.concat([one.values, other.values], 0), tf.concat(indices, 0), one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def sum_on(device: str | None, tensors: Sequence[Any]) -> Any:
    """Add up gradients on a device, or, without one, where they are; None of none."""
    total = None
    for tensor in tensors:
        if device is not None:
            with tf.device(device):
                tensor = tf.identity(tensor)
        total = tensor if total is None else plus(total, tensor)
    return total
