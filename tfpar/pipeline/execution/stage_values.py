"""The values that stages receive and send: their specs, their tensors for one micro-batch, and a forward pass."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat import keras_model, keras_probabilities


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """The spec of a value that a stage receives or sends.

    Args:
        spec: Its shape `[None, ...]` and type.
        mask: Those of its Keras mask; None for none.
        needs_gradient: Whether the backward pass computes its gradient.
        per_example: Whether it is known to have one row for each example.
        activation: The activation of probabilities that are sent as logits; an empty text for others.
    """

    spec: tf.TensorSpec
    mask: tf.TensorSpec | None = None
    needs_gradient: bool = False
    per_example: bool = False
    activation: str = ""

    def received(self, tensor: Any, mask: tf.Tensor | None) -> Any:
        """Return the value from its tensor and its mask as they are sent."""
        return keras_model.with_mask(keras_probabilities.received_as(tensor, self.activation), mask)


@dataclasses.dataclass
class MaskedTensor:
    """A value of one micro-batch: a tensor and its Keras mask."""

    tensor: tf.Tensor
    mask: tf.Tensor | None = None

    def on(self, device: str) -> MaskedTensor:
        """Return a copy on a device; TensorFlow sends it as soon as it is computed."""
        with tf.device(device):
            return MaskedTensor(tf.identity(self.tensor), None if self.mask is None else tf.identity(self.mask))


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
    """Return the spec of an output of a stage, or of a mask; None of None."""
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(tensor)
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
