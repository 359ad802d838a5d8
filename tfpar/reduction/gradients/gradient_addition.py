"""Sums of gradients in TensorFlow's forms: a tensor, indexed slices (of an embedding), or None."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import tensorflow as tf


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Return all tensors in a structure, including those of indexed slices."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, str)]


def dense_part(tensor: Any) -> Any:
    """Return the differentiable part of a tensor: the values of a ragged or sparse tensor, or the tensor."""
    if isinstance(tensor, tf.SparseTensor):
        return tensor.values
    return tensor.flat_values if isinstance(tensor, tf.RaggedTensor) else tensor


def dense_parts(structure: Any) -> list[Any]:
    """Return the differentiable part of each tensor of a structure, such as a tensor in pieces."""
    return [dense_part(one) for one in tf.nest.flatten(structure)]


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
    """Return a tensor, indexed slices, rows of lookups or None with the values of its traced tensors."""
    if isinstance(structure, tuple):
        return tuple(
            rows._replace(values=known[rows.values.ref()], indices=known[rows.indices.ref()]) for rows in structure
        )
    if isinstance(structure, tf.IndexedSlices):
        parts = (structure.values, structure.indices, structure.dense_shape)
        return tf.IndexedSlices(*(None if part is None else known[part.ref()] for part in parts))
    return None if structure is None else known[structure.ref()]


def reached_from(tensors: Sequence[Any], stop: Container[tf.Operation] = ()) -> set[tf.Operation]:
    """Return the operations that depend on tensors, their own included, except through the operations of `stop`."""
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

    Keras' Adam applies duplicate IndexedSlices rows separately. To match one device, slices of per-example lookups are
    concatenated. Slices of lookups that do not depend on the batch (e.g. positions) are summed.

    Args:
        one: A gradient.
        other: A gradient of the same weight.
    """
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = [one.indices, other.indices]
        if one.indices.dtype != other.indices.dtype:
            indices = [tf.cast(some, tf.int64) for some in indices]
        return tf.IndexedSlices(tf.concat([one.values, other.values], 0), tf.concat(indices, 0), one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def sum_of(gradients: Iterable[Any]) -> Any:
    """Return the sum of gradients, each a tensor, indexed slices or None; None for no gradients."""
    return functools.reduce(plus, gradients, None)
