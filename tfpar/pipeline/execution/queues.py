"""Queues of the tensors of micro-batches, first in, first out, whose lengths may change in a loop.

    F0 F1 F2 …  ─►  [saved 2, saved 1, saved 0]  ─►  B0 B1 B2 …

A queue is a list of bundles. TensorFlow 2.21 has kernels on GPUs to concatenate lists and to take the last item, but
none to take another item of type variant, so that a new bundle becomes the first item.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpar.pipeline.stages.bundles import Devices

Queue = list[tf.Tensor]  # a list on each device, and one on the host for integers of 32 bits, as in a bundle

_HOST = "CPU:0"
_SCALAR = np.zeros([0], np.int32)


def appended(queue: Queue | None, tensors: Sequence[tf.Tensor], device: Devices) -> Queue:
    """Return a queue with more tensors at its end.

    Args:
        queue: A queue; None for an empty one.
        tensors: As many tensors each time, of the same types.
        device: The device that holds them, or the device of each.

    Example:
        >>> queue = appended(None, [tf.constant(1.0), tf.constant(2)], "CPU:0")
        >>> queue = appended(queue, [tf.constant(3.0), tf.constant(4)], "CPU:0")
        >>> _, first = pop_first(queue, [tf.TensorSpec([]), tf.TensorSpec([], tf.int32)], "CPU:0")
        >>> [float(one) for one in first]
        [1.0, 2.0]
    """
    groups = _places(tensors, device)
    before = [None] * len(groups) if queue is None else queue
    pairs = zip(groups, before, strict=True)
    return [_with_first([tensors[one] for one in group], items, place) for (place, group), items in pairs]


def pop_first(
    queue: Queue, specs: Sequence[tf.Tensor | tf.TensorSpec], device: Devices
) -> tuple[Queue, list[tf.Tensor]]:
    """Return a queue without the tensors at its front, and those tensors.

    Args:
        queue: A queue that is not empty.
        specs: The specs of the tensors, or tensors like them.
        device: The device that holds them, or the device of each.
    """
    rest: Queue = []
    found: dict[int, tf.Tensor] = {}
    for items, (place, group) in zip(queue, _places(specs, device), strict=True):
        types, shapes = [specs[one].dtype for one in group], [specs[one].shape for one in group]
        with tf.device(place):
            others, last = tf.raw_ops.TensorListPopBack(
                input_handle=items, element_shape=_SCALAR, element_dtype=tf.variant
            )
            values = tf.raw_ops.OptionalGetValue(optional=last, output_types=types, output_shapes=shapes)
        rest.append(others)
        if place == _HOST:  # a loop over integers runs where they come from
            homes = [device if isinstance(device, str) else device[one] for one in group]
            values = [_copied(value, home) for value, home in zip(values, homes, strict=True)]
        found.update(zip(group, values, strict=True))
    return rest, [found[index] for index in range(len(specs))]


def _copied(value: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(value)


def _places(specs: Sequence[tf.Tensor | tf.TensorSpec], device: Devices) -> list[tuple[str, list[int]]]:
    """Return the indices of the tensors on each device."""
    found: dict[str, list[int]] = {}
    apart = []
    for index, spec in enumerate(specs):
        if spec.dtype == tf.int32:
            apart.append(index)
        else:
            found.setdefault(device if isinstance(device, str) else device[index], []).append(index)
    return [*found.items(), *([(_HOST, apart)] if apart else [])]


def _with_first(tensors: Sequence[tf.Tensor], items: tf.Tensor | None, device: str) -> tf.Tensor:
    """Return a list with a bundle of tensors before its other items."""
    with tf.device(device):
        empty = tf.raw_ops.EmptyTensorList(element_shape=_SCALAR, element_dtype=tf.variant, max_num_elements=-1)
        bundle = tf.raw_ops.OptionalFromValue(components=tensors)
        first = tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=bundle)
        if items is None:
            return first
        return tf.raw_ops.TensorListConcatLists(input_a=first, input_b=items, element_dtype=tf.variant)
