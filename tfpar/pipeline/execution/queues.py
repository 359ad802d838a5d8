"""First-in, first-out queues of tensors, whose length may change in a loop.

    F0 F1 F2 …  ─►  [saved 2, saved 1, saved 0]  ─►  B0 B1 B2 …

A queue is a tensor list of bundles. On GPUs, TensorFlow 2.21 can concatenate lists and remove the last item, but cannot
read other items of type variant. So new bundles are inserted at the front.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpar.pipeline.stages.bundles import Devices
from tfpar.pipeline.stages.values import copies_on

Queue = list[tf.Tensor]  # a tensor list for each device, and one on the host for int32 tensors, as in a bundle

_HOST = "CPU:0"
_SCALAR = np.zeros([0], np.int32)


def appended(queue: Queue | None, tensors: Sequence[tf.Tensor], device: Devices) -> Queue:
    """Append tensors to a queue.

    Args:
        queue: A queue; None for an empty one.
        tensors: The tensors, with the same types each time.
        device: The device of all tensors, or of each.

    Example:
        >>> queue = appended(None, [tf.constant(1.0), tf.constant(2)], "CPU:0")
        >>> queue = appended(queue, [tf.constant(3.0), tf.constant(4)], "CPU:0")
        >>> _, first = pop_first(queue, [tf.TensorSpec([]), tf.TensorSpec([], tf.int32)], "CPU:0")
        >>> list(map(float, first))
        [1.0, 2.0]
    """
    groups = _by_device(tensors, device)
    before = [None] * len(groups) if queue is None else queue
    pairs = zip(groups, before, strict=True)
    return [_with_first([tensors[index] for index in indices], items, place) for (place, indices), items in pairs]


def pop_first(
    queue: Queue, specs: Sequence[tf.Tensor | tf.TensorSpec], device: Devices
) -> tuple[Queue, list[tf.Tensor]]:
    """Remove the tensors that were appended first; return the rest of the queue, and the tensors.

    Args:
        queue: A queue that is not empty.
        specs: The specs of the tensors, or tensors like them.
        device: The device of all tensors, or of each.
    """
    rest: Queue = []
    tensors: dict[int, tf.Tensor] = {}
    for items, (place, indices) in zip(queue, _by_device(specs, device), strict=True):
        types, shapes = [specs[index].dtype for index in indices], [specs[index].shape for index in indices]
        with tf.device(place):
            others, last = tf.raw_ops.TensorListPopBack(
                input_handle=items, element_shape=_SCALAR, element_dtype=tf.variant
            )
            values = tf.raw_ops.OptionalGetValue(optional=last, output_types=types, output_shapes=shapes)
        rest.append(others)
        if place == _HOST:  # loops over int32 tensors run on the device that appended them
            origins = [device if isinstance(device, str) else device[index] for index in indices]
            values = [copies_on([origin], value) for value, origin in zip(values, origins, strict=True)]
        tensors.update(zip(indices, values, strict=True))
    return rest, [tensors[index] for index in range(len(specs))]


def _by_device(specs: Sequence[tf.Tensor | tf.TensorSpec], device: Devices) -> list[tuple[str, list[int]]]:
    """Return the indices of the tensors on each device, and of int32 tensors on the host."""
    groups: dict[str, list[int]] = {}
    integers = []
    for index, spec in enumerate(specs):
        if spec.dtype == tf.int32:
            integers.append(index)
        else:
            groups.setdefault(device if isinstance(device, str) else device[index], []).append(index)
    return [*groups.items(), *([(_HOST, integers)] if integers else [])]


def _with_first(tensors: Sequence[tf.Tensor], items: tf.Tensor | None, device: str) -> tf.Tensor:
    """Insert a bundle of tensors at the front of a tensor list."""
    with tf.device(device):
        empty = tf.raw_ops.EmptyTensorList(element_shape=_SCALAR, element_dtype=tf.variant, max_num_elements=-1)
        bundle = tf.raw_ops.OptionalFromValue(components=tensors)
        first = tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=bundle)
        if items is None:
            return first
        return tf.raw_ops.TensorListConcatLists(input_a=first, input_b=items, element_dtype=tf.variant)
