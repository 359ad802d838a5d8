"""Bundles: many tensors in one, so that a call of a stage has a handful of arguments and results instead of hundreds.

    w1 w2 … w96  ─► bundle ─► F ─► bundle of 300 saved tensors ─► B

TensorFlow 2.21 needs 2.5 ms to add a call with 300 arguments and results to a graph, and 0.3 ms for one with 10, and a
loop has several operations for each tensor that it carries. A bundle refers to its tensors and copies nothing; their
memory is free once the bundle is.

A large bundle has bundles of bundles. The type of one lists its tensors, and is inferred for each of them again: for a
stage of 12 transformer blocks, with a thousand saved tensors, that took 26 of 55 seconds until the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_onednn

# For each device one of type variant with tensors of other types than int32; then those of int32.
Bundle = list[tf.Tensor]
_MAX_COMPONENTS = 16  # of one bundle; of others it has bundles
Devices = str | Sequence[str]  # of all tensors, or of each


def bundled(tensors: Sequence[tf.Tensor], devices: Devices) -> Bundle:
    """Bundle tensors.

    Args:
        tensors: Any tensors.
        devices: The device that holds them, or the device of each.

    Returns:
        A scalar of type variant for each device, then the integers of 32 bits: those are sizes and indices, which on a
        GPU are in the memory of the host, where TensorFlow's operations need them.

    Example:
        >>> bundle = bundled([tf.constant(1.0), tf.constant([2, 3])], "CPU:0")
        >>> specs = [tf.TensorSpec([]), tf.TensorSpec([2], tf.int32)]
        >>> [one.numpy().tolist() for one in unbundle(bundle, specs, "CPU:0")]
        [1.0, [2, 3]]
    """
    found: Bundle = []
    for device, group in _by_device(tensors, devices).items():
        with tf.device(device):
            found.append(_joined([tensors[one] for one in group]))
    return [*found, *(tensor for tensor in tensors if tensor.dtype == tf.int32)]


def unbundle(bundle: Bundle, specs: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> list[tf.Tensor]:
    """Return the tensors of a bundle.

    Args:
        bundle: As `bundled` returns it.
        specs: The specs of its tensors, or tensors like them.
        devices: The device that holds them, or the device of each.
    """
    groups = _by_device(specs, devices)
    found: dict[int, tf.Tensor] = {}
    for part, (device, group) in zip(bundle, groups.items(), strict=False):  # the integers come after them
        types, shapes = [specs[one].dtype for one in group], [specs[one].shape for one in group]
        with tf.device(device):
            values = _components(part, types, shapes)
        found.update(zip(group, [tf_onednn.sole_output(value, device) for value in values], strict=True))
    apart = iter(bundle[len(groups) :])
    return [found[index] if index in found else next(apart) for index in range(len(specs))]


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) <= _MAX_COMPONENTS:
        return tf.raw_ops.OptionalFromValue(components=tensors)
    return _joined([_joined(part) for part in _parts(tensors)])


def _components(bundle: tf.Tensor, types: Sequence[tf.DType], shapes: Sequence[Any]) -> list[tf.Tensor]:
    if len(types) <= _MAX_COMPONENTS:
        return list(tf.raw_ops.OptionalGetValue(optional=bundle, output_types=types, output_shapes=shapes))
    parts = list(zip(_parts(types), _parts(shapes), strict=True))
    bundles = _components(bundle, [tf.variant] * len(parts), [[]] * len(parts))
    found = zip(bundles, parts, strict=True)
    return [tensor for one, of_part in found for tensor in _components(one, *of_part)]


def _parts(sequence: Sequence[Any]) -> list[Sequence[Any]]:
    return [sequence[begin : begin + _MAX_COMPONENTS] for begin in range(0, len(sequence), _MAX_COMPONENTS)]


def specs_of(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices = "") -> list[tf.TensorSpec]:
    """Return the specs of the bundle of some tensors."""
    apart = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors if tensor.dtype == tf.int32]
    return [*(tf.TensorSpec([], tf.variant) for _ in _by_device(tensors, devices)), *apart]


def devices_of_parts(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> list[str]:
    """Return the device of each tensor of the bundle of some tensors; integers of 32 bits count as on the first."""
    first = devices if isinstance(devices, str) else next(iter(devices), "")
    return [*_by_device(tensors, devices), *(first for tensor in tensors if tensor.dtype == tf.int32)]


def _by_device(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> dict[str, list[int]]:
    """Return the indices of the tensors of other types than int32 on each device."""
    found: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tf.int32:
            found.setdefault(devices if isinstance(devices, str) else devices[index], []).append(index)
    return found


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
