"""The values that stages receive and send: their specs, and their tensors for one micro-batch.

A stage of several devices that ends with the scores of classes sends a shard of these from each device to the loss:

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
        spec: Its shape `[None, ...]` and type; a tuple of those of its shards along the last axis.
        mask: Those of its Keras mask; None for none.
        needs_gradient: Whether the backward pass computes its gradient.
        per_example: Whether it is known to have one row for each example.
        activation: The activation of probabilities that are sent as logits; an empty text for others.
        source: What its elements depend on, which may be row numbers of a later stage.
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
        """The spec of the whole tensor, to which shards are joined."""
        if not self.is_sharded:
            return self.spec
        sizes = [shard.shape[-1] for shard in self.spec]
        return tf.TensorSpec([*self.spec[0].shape[:-1], sum(sizes)], self.spec[0].dtype)

    def received(self, tensor: Any, mask: tf.Tensor | None, devices: Sequence[str] = ()) -> Any:
        """Return the value as layers and losses take it.

        Args:
            tensor: The tensor that is sent, or its shards.
            mask: Its Keras mask; None for none.
            devices: The device of each shard.
        """
        whole = MaskedTensor(tensor).whole(*devices)
        return keras_model.with_mask(keras_probabilities.received_as(whole, self.activation), mask)


@dataclasses.dataclass
class MaskedTensor:
    """A value of one micro-batch: a tensor, or a tuple of its shards, and its Keras mask."""

    tensor: Any
    mask: tf.Tensor | None = None

    def on(self, *devices: str) -> MaskedTensor:
        """Return a copy on a device; TensorFlow sends it as soon as it is computed.

        Args:
            *devices: The device; for a sharded value that of each shard, of which the first has the mask.
        """
        return MaskedTensor(copies_on(devices, self.tensor), copies_on(devices, self.mask))

    def whole(self, *devices: str) -> Any:
        """Return the tensor, shards joined on the first device; `on` has the argument."""
        return gathered_classes.joined(self.tensor, devices) if isinstance(self.tensor, tuple) else self.tensor


def copies_on(devices: Sequence[str], tensor: Any) -> Any:
    """Return a copy of a tensor on the first of some devices, or of each of its shards on the device of the shard.

    Args:
        devices: The device of each shard.
        tensor: A tensor, a tuple of shards, or None.
    """
    if isinstance(tensor, tuple):
        return tuple(copies_on([device], shard) for device, shard in zip(devices, tensor, strict=True))
    with tf.device(devices[0]):
        return None if tensor is None else tf.identity(tensor)


def sum_on(devices: Sequence[str], gradients: Sequence[Any]) -> Any:
    """Return the sum of gradients of a value on its device, or of each of its shards on the device of the shard.

    Args:
        devices: The device; for a sharded value that of each shard.
        gradients: Gradients, a tuple of shards or None each.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not any(isinstance(gradient, tuple) for gradient in present):
        with tf.device(devices[0]):
            return sum_of(present)
    of_shards = zip(devices, zip(*present, strict=True), strict=True)
    return tuple(copies_on([device], sum_on([device], shards)) for device, shards in of_shards)


def places_of(devices: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return the device of each tensor of values on the first of some devices, or in shards on all.

    Args:
        devices: The devices.
        values: A tensor, a tuple of shards, or None each.
    """
    places: list[str] = []
    for value in values:
        places += devices if isinstance(value, tuple) else devices[: value is not None]
    return places


class Place(NamedTuple):
    """The place of a micro-batch in its global batch.

    Args:
        number: The index of the micro-batch, an int64 scalar.
        part: Its part of the examples of the batch, from 0 to 1, a float64 scalar.
        sums: The sum and weight over the whole batch of each loss that the stage's layers compute, float64
            `[losses, 2]`.
    """

    number: Any
    part: Any
    sums: Any

    @classmethod
    def specs(cls) -> Place:
        """Return the specs of the place of any micro-batch."""
        return cls(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64), tf.TensorSpec([None, 2], tf.float64))


def spec_of_output(tensor: Any) -> Any:
    """Return the spec of an output of a stage, of its shards, or of a mask; None of None."""
    if isinstance(tensor, tuple):
        return tuple(map(spec_of_output, tensor))
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(tensor)
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
