"""Stages on several devices, each with a shard of the weights (tensor parallelism).

    stage 0   device 0 ─┐            stage 1   device 2 ─┐
              device 1 ─┴─ sum ─► activation ─► device 3 ─┴─ sum

The first device of a stage holds all states, and receives and sends whole values, except for class scores, which the
last stage sends to the loss in shards. Each shard of a weight is a parameter of the stage. Its gradient and the saved
tensors of its operations are on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat import tf_distribute, tf_onednn
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.graph.ir import Value


class ShardedCalls(Protocol):
    """The layer calls of a stage, some of which are sharded."""

    @property
    def devices(self) -> Sequence[str]:
        """The device of each shard. The first also runs unsharded calls."""

    def run(self, tensors: dict[Value, Any], training: bool) -> None:
        """Run the layer calls, and add their outputs to `tensors`. The stage's outputs are whole, on the first device.

        Args:
            tensors: Tensors by value, including the inputs of the stage.
            training: Whether the model is trained.
        """


def shard_of(tensor: tf.Tensor, devices: Sequence[str]) -> int:
    """Return the index of the shard that computes a traced tensor; 0 if it is not on one of the devices."""
    return shard_of_device(str(tensor.device), devices)


def shard_of_device(name: str, devices: Sequence[str]) -> int:
    """Return the index of a device, by its full or short name; 0 if it is not one of the devices.

    Example:
        >>> shard_of_device("/job:localhost/device:CPU:3", ["/device:CPU:2", "/device:CPU:3"])
        1
    """
    indices = {_short(device): shard for shard, device in enumerate(devices)}
    return indices.get(_short(name), 0) if name else 0


def copy_argument(tensor: tf.Tensor | None, devices: Sequence[str]) -> tf.Tensor | None:
    """Copy an argument on the device of its shard, after the current control dependencies.

    TensorFlow 2.21 cannot apply control dependencies to imported operations.

    Args:
        tensor: A tensor. Variants and None are returned unchanged.
        devices: The device of each shard.
    """
    if tensor is None or tensor.dtype == tf.variant:
        return tensor
    device = devices[shard_of(tensor, devices)]
    with tf.device(device):
        return tf_onednn.sole_output(tf.identity(tensor), device)


def requested_device(name: str, devices: Sequence[str], jit_compile: bool = False) -> str:
    """Return the device name for an operation of a stage: empty for the first shard, which is the default.

    Args:
        name: Device of the operation in the traced graph.
        devices: The device of each shard of the stage.
        jit_compile: Whether XLA compiles the stage. Then no operation is placed on the host.

    Example:
        >>> requested_device("/device:CPU:0", ["/device:GPU:2"]), requested_device("/device:GPU:2", ["/device:GPU:2"])
        ('/device:CPU:0', '')
    """
    if shard := shard_of_device(name, devices):
        return devices[shard]
    is_on_host = _short(name) == ("CPU", 0) and host_sizes.is_gpu(devices[0])
    return tf_distribute.host_of(devices[0]) if is_on_host and not jit_compile else ""


def _short(name: str) -> tuple[str | None, int | None]:
    spec = tf.DeviceSpec.from_string(name)
    return spec.device_type, spec.device_index


def copy_shards(variables: Sequence[Any], values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Copy the values of shards to their devices, and return all values.

    Args:
        variables: Keras variables, or shards of variables.
        values: The value of each.
        devices: The device of each shard.
    """
    placed = []
    for variable, value in zip(variables, values, strict=True):
        shard = sharded_memory.shard_of(variable)
        if shard is None:
            placed.append(value)
            continue
        with tf.device(devices[shard[1]]):
            placed.append(tf.identity(value))
    return placed


def replace_devices(operations: Any, before: Sequence[str], after: Sequence[str]) -> Any:
    """Return a copy of a graph for the devices of another replica.

    Args:
        operations: A `GraphDef`, with devices as `requested_device` returns them.
        before: The device of each shard.
        after: The device of each shard in the copy.
    """
    hosts = (list(map(tf_distribute.host_of, devices)) for devices in (before, after))
    names: Mapping[str, str] = dict(zip(*hosts, strict=True)) | dict(zip(before, after, strict=True))
    copy = type(operations)()
    copy.CopyFrom(operations)
    for node in copy.node:
        if node.device:
            node.device = names[node.device]
    return copy
