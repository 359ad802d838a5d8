"""Values on the devices of the shards: whole on the first device, or in pieces.

The gradient of a transfer returns to the device that sent the value, so that the backward pass of each operation runs
where its forward pass did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction.vocabulary import gathered_classes
from tfpar.reduction.vocabulary.vocabulary_losses import ClassShards


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedValue:
    """A value in pieces along an axis, one on each device.

    Args:
        tensors: The pieces, `[batch, ...]` each.
        axis: The divided axis, from the end.
        mask: The Keras mask of the whole value, on the first device; None for none.
    """

    tensors: tuple[tf.Tensor, ...]
    axis: int
    mask: tf.Tensor | None = None


def sent(value: Any, source: str, target: str) -> Any:
    """Send a tensor from the device of one shard to that of another; its gradient is sent back.

    Args:
        value: A tensor on the source; a sparse or ragged one is sent in its parts.
        source: A device.
        target: A device.
    """
    if source == target:
        return value
    return tf.nest.map_structure(lambda part: _sent(part, source, target), value, expand_composites=True)


def _sent(tensor: tf.Tensor, source: str, target: str) -> tf.Tensor:
    @tf.custom_gradient
    def transfer(value: tf.Tensor) -> Any:
        with tf.device(target):
            arrived = tf.identity(value)

        def back(gradient: tf.Tensor) -> tf.Tensor:
            with tf.device(source):
                return tf.identity(gradient)

        return arrived, back

    with tf.device(target):  # else the operation of the custom gradient would take both tensors to the first device
        return transfer(tensor)


def gathered(pieces: Sequence[tf.Tensor], axis: int, devices: Sequence[str]) -> tf.Tensor:
    """Return pieces as one tensor on the first device.

    Args:
        pieces: The piece on each device.
        axis: The divided axis.
        devices: The devices.
    """
    home = devices[0]
    with tf.device(home):
        whole = tf.concat([sent(one, device, home) for one, device in zip(pieces, devices, strict=True)], axis)
    return whole if axis != -1 else gathered_classes.note_shards(whole, ClassShards(pieces, devices))


def added(partial: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """Return the sum of the partial results of the shards, in their order, on the first device.

    Args:
        partial: The partial result on each device.
        devices: The devices.
    """
    home = devices[0]
    total = partial[0]
    for one, device in zip(partial[1:], devices[1:], strict=True):
        arrived = sent(one, device, home)
        with tf.device(home):
            total = total + arrived
    return total


def divided(tensor: Any, sizes: Sequence[int], axis: int, devices: Sequence[str]) -> tuple[Any, ...]:
    """Return a whole tensor of the first device in pieces.

    Args:
        tensor: A dense tensor, or a sparse one `[batch, ..., columns]`, which is divided by its columns.
        sizes: The size of each piece.
        axis: The axis to divide.
        devices: The devices.
    """
    with tf.device(devices[0]):
        if isinstance(tensor, tf.SparseTensor):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            parts = [_sparse_columns(tensor, start, size) for start, size in zip(starts, sizes, strict=True)]
        else:
            parts = tf.split(tensor, list(sizes), axis)
    return tuple(sent(part, devices[0], device) for part, device in zip(parts, devices, strict=True))


def _sparse_columns(tensor: tf.SparseTensor, start: int, size: int) -> tf.SparseTensor:
    columns = tensor.indices[:, -1]
    inside = tf.where((columns >= start) & (columns < start + size))[:, 0]
    offset = tf.constant([0] * (tensor.shape.rank - 1) + [start], tf.int64)
    shape = tf.concat([tensor.dense_shape[:-1], tf.constant([size], tf.int64)], 0)
    return tf.SparseTensor(tf.gather(tensor.indices, inside) - offset, tf.gather(tensor.values, inside), shape)
