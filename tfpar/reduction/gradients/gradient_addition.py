"""Sums of gradients, each a tensor, `tf.IndexedSlices` (of an embedding) or None."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import tensorflow as tf


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Return all tensors in a structure, including the components of `tf.IndexedSlices`."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, str)]


def dense_part(tensor: Any) -> Any:
    """Return the differentiable part of a tensor: the values of a ragged or sparse tensor, else the tensor."""
    if isinstance(tensor, tf.SparseTensor):
        return tensor.values
    return tensor.flat_values if isinstance(tensor, tf.RaggedTensor) else tensor


def dense_parts(structure: Any) -> list[Any]:
    """Return the differentiable part of each tensor in a structure."""
    return [dense_part(leaf) for leaf in tf.nest.flatten(structure)]


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
    """Replace the traced tensors of a gradient (a tensor, `tf.IndexedSlices`, rows of lookups or None) by values."""
    if isinstance(structure, tuple):
        return tuple(
            rows._replace(values=known[rows.values.ref()], indices=known[rows.indices.ref()]) for rows in structure
        )
    if isinstance(structure, tf.IndexedSlices):
        parts = (structure.values, structure.indices, structure.dense_shape)
        return tf.IndexedSlices(*(None if part is None else known[part.ref()] for part in parts))
    return None if structure is None else known[structure.ref()]


def reached_from(tensors: Sequence[Any], stop: Container[tf.Operation] = ()) -> set[tf.Operation]:
    """Return the operations of some tensors and all that depend on them, not searching beyond those in `stop`."""
    waiting = tensors_of(tensors)
    reached = {tensor.op for tensor in waiting}
    while waiting:
        for op in waiting.pop().consumers():
            if op not in reached and op not in stop:
                reached.add(op)
                waiting += op.outputs
    return reached


def plus(first: Any, second: Any) -> Any:
    """Add two gradients of one weight; two sparse gradients are concatenated, so that the sum stays sparse.

    Keras' Adam applies duplicate rows separately, as it does on one device for rows of different examples.
    """
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        indices = [first.indices, second.indices]
        if first.indices.dtype != second.indices.dtype:
            indices = [tf.cast(rows, tf.int64) for rows in indices]
        return tf.IndexedSlices(tf.concat([first.values, second.values], 0), tf.concat(indices, 0), first.dense_shape)
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


def sum_of(gradients: Iterable[Any]) -> Any:
    """Return the sum of gradients; None if there are none."""
    return functools.reduce(plus, gradients, None)
