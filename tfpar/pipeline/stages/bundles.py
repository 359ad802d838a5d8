"""Bundles: many tensors in one, so that a call of a stage has a few arguments and results instead of hundreds.

    w1 w2 … w96  ─► bundle ─► F ─► bundle of 300 saved tensors ─► B

TensorFlow 2.21 needs 2.5 ms to add a call with 300 arguments and results to a graph, but 0.3 ms with 10, and a loop has
several operations for each tensor that it carries. A bundle refers to its tensors without copying them, and releases
them when it is released.

Large bundles are nested. TensorFlow infers the type of a bundle, which lists its tensors, once for each of them: for a
stage of 12 transformer blocks with a thousand saved tensors, that took 26 of the 55 seconds until the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_onednn

# One tensor of type variant for each device, then the int32 tensors.
Bundle = list[tf.Tensor]
_MAX_COMPONENTS = 16  # larger bundles are nested
Devices = str | Sequence[str]  # the device of all tensors, or of each


def bundled(tensors: Sequence[tf.Tensor], devices: Devices) -> Bundle:
    """Bundle tensors.

    Args:
        tensors: Any tensors.
        devices: The device of all tensors, or of each.

    Returns:
        A variant scalar for each device, then the int32 tensors: sizes and indices, which operations on a GPU read from
        the host's memory.

    Example:
        >>> bundle = bundled([tf.constant(1.0), tf.constant([2, 3])], "CPU:0")
        >>> specs = [tf.TensorSpec([]), tf.TensorSpec([2], tf.int32)]
        >>> [tensor.numpy().tolist() for tensor in unbundle(bundle, specs, "CPU:0")]
        [1.0, [2, 3]]
    """
    bundle: Bundle = []
    for device, indices in _by_device(tensors, devices).items():
        with tf.device(device):
            bundle.append(_nested([tensors[index] for index in indices]))
    return [*bundle, *(tensor for tensor in tensors if tensor.dtype == tf.int32)]


def unbundle(bundle: Bundle, specs: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> list[tf.Tensor]:
    """Return the tensors of a bundle.

    Args:
        bundle: The result of `bundled`.
        specs: The specs of its tensors, or tensors like them.
        devices: The device of all tensors, or of each.
    """
    groups = _by_device(specs, devices)
    tensors: dict[int, tf.Tensor] = {}
    for variant, (device, indices) in zip(bundle, groups.items(), strict=False):  # int32 tensors come after them
        types, shapes = [specs[index].dtype for index in indices], [specs[index].shape for index in indices]
        with tf.device(device):
            values = _components(variant, types, shapes)
        tensors.update(zip(indices, [tf_onednn.sole_output(value, device) for value in values], strict=True))
    integers = iter(bundle[len(groups) :])
    return [tensors[index] if index in tensors else next(integers) for index in range(len(specs))]


def _nested(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) <= _MAX_COMPONENTS:
        return tf.raw_ops.OptionalFromValue(components=tensors)
    return _nested([_nested(chunk) for chunk in _chunks(tensors)])


def _components(bundle: tf.Tensor, types: Sequence[tf.DType], shapes: Sequence[Any]) -> list[tf.Tensor]:
    if len(types) <= _MAX_COMPONENTS:
        return list(tf.raw_ops.OptionalGetValue(optional=bundle, output_types=types, output_shapes=shapes))
    chunks = list(zip(_chunks(types), _chunks(shapes), strict=True))
    bundles = _components(bundle, [tf.variant] * len(chunks), [[]] * len(chunks))
    pairs = zip(bundles, chunks, strict=True)
    return [tensor for inner, specs in pairs for tensor in _components(inner, *specs)]


def _chunks(sequence: Sequence[Any]) -> list[Sequence[Any]]:
    return [sequence[begin : begin + _MAX_COMPONENTS] for begin in range(0, len(sequence), _MAX_COMPONENTS)]


def bundle_specs(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices = "") -> list[tf.TensorSpec]:
    """Return the specs of a bundle of tensors."""
    integers = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors if tensor.dtype == tf.int32]
    return [*(tf.TensorSpec([], tf.variant) for _ in _by_device(tensors, devices)), *integers]


def bundle_devices(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> list[str]:
    """Return the device of each tensor in a bundle of tensors. The int32 tensors count as on the first device."""
    first = devices if isinstance(devices, str) else next(iter(devices), "")
    return [*_by_device(tensors, devices), *(first for tensor in tensors if tensor.dtype == tf.int32)]


def _by_device(tensors: Sequence[tf.Tensor | tf.TensorSpec], devices: Devices) -> dict[str, list[int]]:
    """Return the indices of the tensors on each device, without the int32 tensors."""
    groups: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tf.int32:
            groups.setdefault(devices if isinstance(devices, str) else devices[index], []).append(index)
    return groups


def is_copied(tensor: Any) -> bool:
    """Return whether a tensor of a batch is copied to the device that reads it.

    Other tensors stay on the host: int32, because most of TensorFlow's operations on it run there, and strings, sparse
    and ragged tensors, which few GPU kernels support.

    Args:
        tensor: A tensor of any kind, or None.

    Example:
        >>> is_copied(tf.constant(1.0)), is_copied(tf.constant(1)), is_copied(tf.constant("text"))
        (True, False, False)
    """
    return isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.int32, tf.string, tf.resource, tf.variant)
