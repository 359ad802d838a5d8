"""Values that stages receive and send: their specs, and their tensors for one micro-batch.

A sharded stage sends class scores to the loss in shards, one from each device:

    device 0   [examples, classes 0 to 4] ─┐
                                           ├─► loss and metrics, which read the shards
    device 1   [examples, classes 5 to 9] ─┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat.models import keras_model, keras_probabilities
from tfpar.reduction.gradients.gradient_addition import sum_of
from tfpar.reduction.gradients.row_numbers import Source
from tfpar.reduction.vocabulary import gathered_classes


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """The spec of a value that a stage receives or sends.

    Args:
        spec: Spec of the tensor, `[None, ...]`, or a tuple with the spec of each shard along the last axis.
        mask: Spec of its Keras mask, or None.
        needs_gradient: Whether the backward pass computes its gradient.
        per_example: Whether it is known to have one row for each example.
        activation: The activation of probabilities that are sent as logits; an empty string for others.
        source: What its elements depend on, in case a later stage uses them as row numbers.
    """

    spec: Any
    mask: tf.TensorSpec | None = None
    needs_gradient: bool = False
    per_example: bool = False
    activation: str = ""
    source: Source = Source.EXAMPLES

    @property
    def is_sharded(self) -> bool:
        """Whether it is sent in shards."""
        return isinstance(self.spec, tuple)

    @property
    def whole(self) -> tf.TypeSpec:
        """The spec of the whole tensor, with shards concatenated."""
        if not self.is_sharded:
            return self.spec
        sizes = [shard.shape[-1] for shard in self.spec]
        return tf.TensorSpec([*self.spec[0].shape[:-1], sum(sizes)], self.spec[0].dtype)

    def received(self, tensor: Any, mask: tf.Tensor | None, devices: Sequence[str] = ()) -> Any:
        """Return a sent value as layers and losses expect it.

        Args:
            tensor: The tensor, or its shards.
            mask: Its Keras mask, or None.
            devices: The device of each shard.
        """
        whole = MaskedTensor(tensor).whole(*devices)
        return keras_model.with_mask(keras_probabilities.received_as(whole, self.activation), mask)


@dataclasses.dataclass
class MaskedTensor:
    """A value of one micro-batch: a tensor, or a tuple of its shards, with its Keras mask."""

    tensor: Any
    mask: tf.Tensor | None = None

    def on(self, *devices: str) -> MaskedTensor:
        """Copy the value to a device, as soon as it is computed.

        Args:
            *devices: The device; for a sharded value the device of each shard, with the mask on the first.
        """
        return MaskedTensor(copies_on(devices, self.tensor), copies_on(devices, self.mask))

    def whole(self, *devices: str) -> Any:
        """Return the tensor, with shards concatenated on the first device."""
        return gathered_classes.joined(self.tensor, devices) if isinstance(self.tensor, tuple) else self.tensor


def copies_on(devices: Sequence[str], tensor: Any) -> Any:
    """Copy a tensor to the first device, or each of its shards to the device of the shard.

    Args:
        devices: The device of each shard.
        tensor: A tensor, a tuple of shards, or None.
    """
    if isinstance(tensor, tuple):
        return tuple(copies_on([device], shard) for device, shard in zip(devices, tensor, strict=True))
    with tf.device(devices[0]):
        return None if tensor is None else tf.identity(tensor)


def sum_on(devices: Sequence[str], gradients: Sequence[Any]) -> Any:
    """Sum the gradients of a value on the first device, or of each shard on the device of the shard.

    Args:
        devices: The device of each shard.
        gradients: Each a tensor, a tuple of shards, or None.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not any(isinstance(gradient, tuple) for gradient in present):
        with tf.device(devices[0]):
            return sum_of(present)
    shards = zip(devices, zip(*present, strict=True), strict=True)
    return tuple(copies_on([device], sum_on([device], summands)) for device, summands in shards)


def value_devices(devices: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return the device of each tensor and each shard among values.

    Args:
        devices: The device of each shard. Tensors are on the first.
        values: Each a tensor, a tuple of shards, or None.
    """
    devices_of_values: list[str] = []
    for value in values:
        devices_of_values += devices if isinstance(value, tuple) else devices[: value is not None]
    return devices_of_values


class BatchPosition(NamedTuple):
    """The position of a micro-batch in its global batch.

    Args:
        number: The index of the micro-batch, an int64 scalar.
        fraction: Its fraction of the examples in the batch, from 0 to 1, a float64 scalar.
        sums: The sum and weight over the whole batch of each loss that layers of the stage compute, float64
            `[losses, 2]`.
    """

    number: Any
    fraction: Any
    sums: Any

    @classmethod
    def specs(cls) -> BatchPosition:
        """Return the specs of the position of any micro-batch."""
        return cls(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64), tf.TensorSpec([None, 2], tf.float64))


def output_spec(tensor: Any) -> Any:
    """Return the spec of an output, a tuple with those of its shards, or None for None."""
    if isinstance(tensor, tuple):
        return tuple(map(output_spec, tensor))
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(tensor)
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
