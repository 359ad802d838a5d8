"""Values that are sharded over devices, and transfers between the devices.

The gradient of a transfer is sent back to the source, so that the backward pass of each operation runs on the device of
its forward pass.
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
    """A value that is sharded along an axis.

    Args:
        tensors: The shard on each device, `[batch, ...]`.
        axis: The sharded axis, counted from the end.
        mask: The Keras mask of the whole value on the first device, or None.
    """

    tensors: tuple[tf.Tensor, ...]
    axis: int
    mask: tf.Tensor | None = None


def sent(value: Any, source: str, target: str) -> Any:
    """Send a tensor to another device; its gradient is sent back.

    Args:
        value: A dense, sparse or ragged tensor on the source.
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

    with tf.device(target):  # or the custom gradient would move both tensors to the first device
        return transfer(tensor)


def gathered(shards: Sequence[tf.Tensor], axis: int, devices: Sequence[str]) -> tf.Tensor:
    """Gather shards on the first device.

    Args:
        shards: The shards, one on each device.
        axis: The sharded axis.
        devices: The devices.
    """
    home = devices[0]
    with tf.device(home):
        whole = tf.concat([sent(shard, device, home) for shard, device in zip(shards, devices, strict=True)], axis)
    return whole if axis != -1 else gathered_classes.note_shards(whole, ClassShards(shards, devices))


def added(partial: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """Add up partial results on the first device, in the order of the devices.

    Args:
        partial: The partial result of each device.
        devices: The devices.
    """
    home = devices[0]
    total = partial[0]
    for result, device in zip(partial[1:], devices[1:], strict=True):
        arrived = sent(result, device, home)
        with tf.device(home):
            total = total + arrived
    return total


def split(tensor: Any, sizes: Sequence[int], axis: int, devices: Sequence[str]) -> tuple[Any, ...]:
    """Split a whole tensor on the first device into shards.

    Args:
        tensor: A dense tensor, or a sparse one `[batch, ..., columns]`, which is split by columns.
        sizes: The size of each shard.
        axis: The axis to shard.
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
