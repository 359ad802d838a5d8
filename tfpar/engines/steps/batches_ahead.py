"""The next batch, copied to the devices that read it while the current step runs.

    step k     device 0   ████████████████  forward, backward, update
    batch k+1  host       ░ cut ─┬─► device 0
                                 └─► device 1          step k+1 reads its tensors on its own devices

In TensorFlow 2.21, a copy to a GPU waits for all operations that were launched on the GPU before. A copy launched by
step k+1 would start after step k; launched with step k, it runs at the same time. A device holds one batch more than
the one it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat.variables import tf_variables
from tfpar.pipeline.stages.bundles import is_copied

HOST = "/device:CPU:0"


class StepBatch(NamedTuple):
    """The batch of a step, and the devices that read it.

    Args:
        batch: Argument of the step, a structure of tensors on the host.
        devices: Device that reads each of the flat tensors; the host for those that stay there.
    """

    batch: Any
    devices: Sequence[str]


class BatchesAhead:
    """Holds the tensors of the upcoming batch in the memory of devices.

    They are in variables of type variant, whose reads and assignments TensorFlow orders, in a loop and between calls.

    Args:
        cut: Returns the batch of a step from an element of the dataset.
    """

    def __init__(self, cut: Callable[[Any], StepBatch]) -> None:
        self._cut = cut
        self._memories: dict[str, _Memory] = {}

    def fill(self, upcoming: tf.experimental.Optional) -> None:
        """Copy the tensors of an upcoming batch to their devices.

        Args:
            upcoming: An optional that contains an element of the dataset.
        """
        batch, devices = self._cut(upcoming.get_value())
        for device, tensors in _by_device(tf.nest.flatten(batch), devices).items():
            self._memory(device).put(tf.raw_ops.OptionalFromValue(components=list(tensors.values())))

    def refill(self, upcoming: tf.experimental.Optional) -> None:
        """Copy the tensors of an upcoming batch, if there is one, in place of those that `receive` returned.

        Args:
            upcoming: An optional element of the dataset.
        """

        def pack() -> list[tf.Tensor]:
            batch, devices = self._cut(upcoming.get_value())
            by_device = _by_device(tf.nest.flatten(batch), devices)
            values = [list(by_device[device].values()) for device in self._memories]
            return [tf.raw_ops.OptionalFromValue(components=tensors) for tensors in values]

        if self._memories:
            packed = tf.cond(upcoming.has_value(), pack, lambda: [tf.raw_ops.OptionalNone() for _ in self._memories])
            for memory, optional in zip(self._memories.values(), packed, strict=True):
                memory.put(optional)

    def receive(self, element: Any) -> Any:
        """Return the batch of a step, with its tensors on their devices.

        Args:
            element: The element whose tensors were copied last.
        """
        batch, devices = self._cut(element)
        flat = tf.nest.flatten(batch)
        for device, tensors in _by_device(flat, devices).items():
            for index, tensor in zip(tensors, self._memory(device).take(list(tensors.values())), strict=True):
                flat[index] = tensor
        return tf.nest.pack_sequence_as(batch, flat)

    def _memory(self, device: str) -> _Memory:
        if device not in self._memories:
            self._memories[device] = _Memory(device)
        return self._memories[device]


class _Memory:
    """A variable on a device for the tensors of a batch, in an optional."""

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.init_scope(), tf.device(device):
            self._handle = tf_variables.anonymous_handle(tf.variant)

    def put(self, optional: tf.Tensor) -> None:
        """Copy the tensors of an optional to the device, and free the previous ones."""
        with tf.device(self._device):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=optional)

    def take(self, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors on the device, which have the shapes and types of `like`."""
        types, shapes = [tensor.dtype for tensor in like], [tensor.shape for tensor in like]
        with tf.device(self._device):
            optional = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            tensors: list[tf.Tensor] = tf.raw_ops.OptionalGetValue(
                optional=optional, output_types=types, output_shapes=shapes
            )
        return tensors


def _by_device(flat: Sequence[Any], devices: Sequence[str]) -> dict[str, dict[int, tf.Tensor]]:
    """Return the tensors to copy to each device, by their index among the flat tensors of the batch."""
    tensors: dict[str, dict[int, tf.Tensor]] = {}
    for index, (tensor, device) in enumerate(zip(flat, devices, strict=True)):
        if is_copied(tensor) and not device.upper().endswith("CPU:0"):
            tensors.setdefault(device, {})[index] = tensor
    return tensors
