"""Bundles: many tensors in one, so that a call of a stage has a handful of arguments and results instead of hundreds.

    w1 w2 … w96  ─► bundle ─► F ─► bundle of 300 saved tensors ─► B

TensorFlow 2.21 needs 2.5 ms to add a call with 300 arguments and results to a graph, and 0.3 ms for one with 10, and a
loop has several operations for each tensor that it carries. A bundle refers to its tensors and copies nothing; their
memory is free once the bundle is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Bundle = list[tf.Tensor]  # one of type variant, if there are tensors of other types than int32, and those of int32


def bundled(tensors: Sequence[tf.Tensor], device: str) -> Bundle:
    """Bundle tensors.

    Args:
        tensors: Any tensors.
        device: The device that holds them.

    Returns:
        A scalar of type variant, then the integers of 32 bits: those are sizes and indices, which on a GPU are in the
        memory of the host, where TensorFlow's operations need them.

    Example:
        >>> bundle = bundled([tf.constant(1.0), tf.constant([2, 3])], "CPU:0")
        >>> specs = [tf.TensorSpec([]), tf.TensorSpec([2], tf.int32)]
        >>> [one.numpy().tolist() for one in unbundle(bundle, specs, "CPU:0")]
        [1.0, [2, 3]]
    """
    apart = [tensor for tensor in tensors if tensor.dtype == tf.int32]
    others = [tensor for tensor in tensors if tensor.dtype != tf.int32]
    if not others:
        return apart
    with tf.device(device):
        return [tf.raw_ops.OptionalFromValue(components=others), *apart]


def unbundle(bundle: Bundle, specs: Sequence[tf.Tensor | tf.TensorSpec], device: str) -> list[tf.Tensor]:
    """Return the tensors of a bundle.

    Args:
        bundle: As `bundled` returns it.
        specs: The specs of its tensors, or tensors like them.
        device: The device that holds them.
    """
    others = [spec for spec in specs if spec.dtype != tf.int32]
    if not others:
        return list(bundle)
    first, *apart = bundle
    with tf.device(device):
        values = tf.raw_ops.OptionalGetValue(
            optional=first, output_types=[spec.dtype for spec in others], output_shapes=[spec.shape for spec in others]
        )
    remaining = {True: iter(apart), False: iter(values)}
    return [next(remaining[spec.dtype == tf.int32]) for spec in specs]


def specs_of(tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.TensorSpec]:
    """Return the specs of the bundle of some tensors."""
    apart = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors if tensor.dtype == tf.int32]
    return [*([tf.TensorSpec([], tf.variant)] if len(apart) < len(tensors) else []), *apart]


def is_copied(tensor: Any) -> bool:
    """Return whether a tensor of a batch is copied to the memory of the device that reads it.

    Integers of 32 bits stay on the host, where most of TensorFlow's operations on them run, and so do texts, and sparse
    and ragged tensors, whose operations have few kernels for GPUs.

    Args:
        tensor: A tensor of any kind, or None.

    Example:
        >>> [is_copied(one) for one in (tf.constant(1.0), tf.constant(1), tf.constant("one"))]
        [True, False, False]
    """
    return isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.int32, tf.string, tf.resource, tf.variant)
