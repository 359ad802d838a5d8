"""Gradients as TensorFlow gives them: a tensor, indexed slices (of what is looked up, as an embedding), or None."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf


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


def reached_from(tensors: Sequence[Any], stop: Container[tf.Operation] = ()) -> set[tf.Operation]:
    """Return the operations that some tensors have an influence on, their own included, but not by way of others."""
    waiting = tensors_of(tensors)
    reached = {tensor.op for tensor in waiting}
    while waiting:
        for op in waiting.pop().consumers():
            if op not in reached and op not in stop:
                reached.add(op)
                waiting += op.outputs
    return reached


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
