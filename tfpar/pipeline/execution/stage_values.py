"""What travels in and out of stages: what is known of a value, the value of a micro-batch, and a forward pass."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """What is known of a value that travels between stages.

    Args:
        spec: Its shape `[None, ...]` and type.
        mask: Those of the Keras mask that travels with it; None for none.
        needs_gradient: Whether a gradient travels back.
    """

    spec: tf.TensorSpec
    mask: tf.TensorSpec | None = None
    needs_gradient: bool = False


@dataclasses.dataclass
class MaskedTensor:
    """A value of one micro-batch: a tensor and its Keras mask."""

    tensor: tf.Tensor
    mask: tf.Tensor | None = None

    def on(self, device: str) -> MaskedTensor:
        """Return it on a device; it leaves for there as soon as it is made."""
        with tf.device(device):
            return MaskedTensor(tf.identity(self.tensor), None if self.mask is None else tf.identity(self.mask))


class Place(NamedTuple):
    """What a micro-batch is in its global batch.

    Args:
        number: Which micro-batch, an int64 scalar.
        part: The part of the batch that it is, from 0 to 1, a float64 scalar.
        sums: What the losses that the stage's layers compute take of the whole batch, float64 `[losses, 2]`.
    """

    number: Any
    part: Any
    sums: Any


class Forward(NamedTuple):
    """The forward pass of one micro-batch through a stage.

    Args:
        made: What the stage makes.
        states: The new value of each of its states; None where it stays.
        losses: What its layers add to the loss.
        known: What the backward pass takes.
    """

    made: list[MaskedTensor]
    states: list[tf.Tensor | None]
    losses: list[tf.Tensor]
    known: dict[Any, tf.Tensor]


def spec_of_made(tensor: Any) -> Any:
    """Return the spec of a tensor that a stage makes, or of a mask; None of None."""
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(tensor)
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
