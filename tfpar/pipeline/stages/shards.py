"""Stages of several devices, each with a shard of the weights, as tensor parallelism divides layer calls.

    stage 0   device 0 ─┐            stage 1   device 2 ─┐
              device 1 ─┴─ sum ─► activation ─► device 3 ─┴─ sum

The first device of a stage has all states. It receives and sends whole values, but for scores of classes, which the
last stage sends to the loss in shards. Each shard of a divided weight is a parameter of the stage, on a device of its
own, with its gradient and the tensors that its operations save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat import tf_distribute, tf_onednn
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.graph.ir import Value


class DividedCalls(Protocol):
    """The layer calls of a stage, some of them divided."""

    @property
    def devices(self) -> Sequence[str]:
        """The device of each shard; the first runs what is not divided."""

    def run(self, tensors: dict[Value, Any], training: bool) -> None:
        """Add the outputs of the layer calls to `tensors`; those that the stage sends are whole, on the first device.

        Args:
            tensors: The inputs of the stage.
            training: Whether the model trains.
        """


def shard_of(tensor: tf.Tensor, devices: Sequence[str]) -> int:
    """Return the shard that computes a traced tensor: 0 for one without a device, or on another one.

    Args:
        tensor: A tensor of a graph.
        devices: The device of each shard in the graph.
    """
    return shard_of_device(str(tensor.device), devices)


def shard_of_device(name: str, devices: Sequence[str]) -> int:
    """Return the shard of a device by its name, in full or in short; 0 for another one.

    Example:
        >>> shard_of_device("/job:localhost/device:CPU:3", ["/device:CPU:2", "/device:CPU:3"])
        1
    """
    numbers = {_short(device): shard for shard, device in enumerate(devices)}
    return numbers.get(_short(name), 0) if name else 0


def argument(tensor: tf.Tensor | None, devices: Sequence[str]) -> tf.Tensor | None:
    """Return a copy of an argument on its shard, which waits for the control dependencies in force.

    TensorFlow 2.21 cannot apply them to imported operations.

    Args:
        tensor: A tensor; one of type variant, and None, is returned as it is.
        devices: The device of each shard.
    """
    if tensor is None or tensor.dtype == tf.variant:
        return tensor
    device = devices[shard_of(tensor, devices)]
    with tf.device(device):
        return tf_onednn.sole_output(tf.identity(tensor), device)


def requested_device(name: str, devices: Sequence[str], jit_compile: bool = False) -> str:
    """Return the device that an operation of a stage requests: none for the first shard, that of another one, the host.

    Args:
        name: Its device in the traced graph.
        devices: The device of each shard of the stage.
        jit_compile: Whether XLA compiles the stage, which then uses no host.

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


def on_shards(variables: Sequence[Any], values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Return the values of variables, each shard of a divided weight on its device.

    Args:
        variables: Keras variables, or shards of divided ones.
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


def on_devices(operations: Any, before: Sequence[str], after: Sequence[str]) -> Any:
    """Return a copy of a graph for the devices of other shards.

    Args:
        operations: A `GraphDef`; operations of the first shard name no device, and others that of a shard or the host.
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
