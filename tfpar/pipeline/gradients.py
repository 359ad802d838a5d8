"""Gradients as TensorFlow gives them: a tensor, indexed slices (of what is looked up, as an embedding), or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Return all tensors in a structure, those of indexed slices too; a None holds none."""
    return [tensor for tensor in tf.nest.flatten(structure, expand_composites=True) if tensor is not None]


def dense_part(tensor: Any) -> Any:
    """Return the part of a tensor that a gradient is of: all of it, or the values of a ragged one."""
    return tensor.flat_values if isinstance(tensor, tf.RaggedTensor) else tensor


def spec_of(tensor: Any) -> tf.TypeSpec:
    """Return the spec of a tensor with any number of rows.

    Args:
        tensor: A tensor or ragged tensor, or its spec.
    """
    shape = [None, *tensor.shape[1:]]
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tf.type_spec_from_value(tensor)
    if isinstance(tensor, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, tensor.dtype, tensor.ragged_rank, tensor.row_splits_dtype)
    return tf.TensorSpec(shape, tensor.dtype)


def value_of(structure: Any, known: dict[Any, tf.Tensor]) -> Any:
    """Return a tensor, indexed slices or None of the traced graph with its tensors' values."""
    if isinstance(structure, tf.IndexedSlices):
        parts = (structure.values, structure.indices, structure.dense_shape)
        return tf.IndexedSlices(*(None if part is None else known[part.ref()] for part in parts))
    return None if structure is None else known[structure.ref()]


def plus(one: Any, other: Any, same_rows: bool = False) -> Any:
    """Add two gradients, each a tensor, indexed slices or None; the sum stays sparse where both are.

    Keras' Adam squares slices one by one, also those of the same row; so rows are listed as on one device, where a
    lookup of every example gives one slice each, and a lookup that no example takes part in one slice in all.

    Args:
        one: A gradient.
        other: Of the same weight.
        same_rows: Whether both are slices of the same rows in the same order.
    """
    if one is None or other is None:
        return other if one is None else one
    if same_rows:
        return tf.IndexedSlices(one.values + other.values, one.indices, one.dense_shape)
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
