"""The upcoming batch on the devices that read it, copied there while the step before runs.

    step k     device 0   ████████████████  forward, backward, update
    batch k+1  host       ░ cut ─┬─► device 0
                                 └─► device 1          step k+1 reads its tensors on its own devices

TensorFlow 2.21 lets a copy to a GPU wait for all operations that the GPU was given before. A copy that a step asks for
begins after the step before; one that is asked for with the step before runs at the same time.

A device holds one batch more than the one that it computes.
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
        batch: A structure of tensors, on the host; the argument of the step.
        devices: The device that reads each of its flat tensors; the host for those that stay there.
    """

    batch: Any
    devices: Sequence[str]


class BatchesAhead:
    """The tensors of the upcoming batch in the memory of devices.

    They are variables of type variant: TensorFlow orders their reads and assignments, in a loop and from one call of it
    to the next.

    Args:
        cut: Returns the batch of a step for an element of the dataset.
    """

    def __init__(self, cut: Callable[[Any], StepBatch]) -> None:
        self._cut = cut
        self._places: dict[str, _Place] = {}

    def fill(self, upcoming: tf.experimental.Optional) -> None:
        """Copy the tensors of an upcoming batch to their devices.

        Args:
            upcoming: An element of the dataset, which there is.
        """
        batch, devices = self._cut(upcoming.get_value())
        for device, tensors in _by_device(tf.nest.flatten(batch), devices).items():
            self._place(device).put(tf.raw_ops.OptionalFromValue(components=list(tensors.values())))

    def refill(self, upcoming: tf.experimental.Optional) -> None:
        """Copy the tensors of an upcoming batch, if there is one, in place of those that `receive` has returned.

        Args:
            upcoming: An element of the dataset, or nothing.
        """

        def some() -> list[tf.Tensor]:
            batch, devices = self._cut(upcoming.get_value())
            found = _by_device(tf.nest.flatten(batch), devices)
            return [tf.raw_ops.OptionalFromValue(components=list(found[device].values())) for device in self._places]

        if self._places:
            bundles = tf.cond(upcoming.has_value(), some, lambda: [tf.raw_ops.OptionalNone() for _ in self._places])
            for place, bundle in zip(self._places.values(), bundles, strict=True):
                place.put(bundle)

    def receive(self, element: Any) -> Any:
        """Return the batch of a step, with its tensors on their devices.

        Args:
            element: The element of the dataset whose tensors were copied last.
        """
        batch, devices = self._cut(element)
        flat = tf.nest.flatten(batch)
        for device, tensors in _by_device(flat, devices).items():
            for index, tensor in zip(tensors, self._place(device).take(list(tensors.values())), strict=True):
                flat[index] = tensor
        return tf.nest.pack_sequence_as(batch, flat)

    def _place(self, device: str) -> _Place:
        if device not in self._places:
            self._places[device] = _Place(device)
        return self._places[device]


class _Place:
    """A variable on a device for the tensors of one batch."""

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.init_scope(), tf.device(device):
            self._handle = tf_variables.anonymous_handle(tf.variant)

    def put(self, bundle: tf.Tensor) -> None:
        """Copy the tensors of a bundle to the device, and free those before."""
        with tf.device(self._device):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=bundle)

    def take(self, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors on the device, with the shapes and types of others."""
        types, shapes = [one.dtype for one in like], [one.shape for one in like]
        with tf.device(self._device):
            bundle = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            found: list[tf.Tensor] = tf.raw_ops.OptionalGetValue(
                optional=bundle, output_types=types, output_shapes=shapes
            )
        return found


def _by_device(flat: Sequence[Any], devices: Sequence[str]) -> dict[str, dict[int, tf.Tensor]]:
    """Return the tensors to copy by device, each with its index among the flat tensors of the batch."""
    found: dict[str, dict[int, tf.Tensor]] = {}
    for index, (tensor, device) in enumerate(zip(flat, devices, strict=True)):
        if is_copied(tensor) and not device.upper().endswith("CPU:0"):
            found.setdefault(device, {})[index] = tensor
    return found
