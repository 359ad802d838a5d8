"""The loss of a model over a micro-batch, divided by what the global batch requires."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_losses, keras_model
from tfpar.reduction.loss_reduction import LossReduction


def taken_after_stages(model: keras.Model, batch: Any) -> Any:
    """Return what the loss and the metrics take of a batch, which is sent to the last stage's device.

    Args:
        model: A compiled model.
        batch: `(inputs, targets, sample_weight)` as far as given, tensors or specs.

    Returns:
        The batch without inputs, unless the model overrides `compute_loss` or `compute_metrics`.
    """
    if any(keras_model.overridden(model, method) for method in ("compute_loss", "compute_metrics")):
        return batch
    return (None, *batch[1:]) if isinstance(batch, tuple) else (None,)


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """The loss that Keras computes for a model, without added losses and penalties, which are computed elsewhere.

    Args:
        model: A compiled model.
        reduction: How its losses are reduced over parts of a batch.
        training: Whether the model is trained.
        devices: The device that computes it; then those of the pieces of outputs that are not on it.
    """

    model: keras.Model
    reduction: LossReduction
    training: bool
    devices: Sequence[str]

    @property
    def device(self) -> str:
        """The device that computes it, of several the first."""
        return self.devices[0]

    def value(self, batch: Any, outputs: Any) -> tf.Tensor:
        """Return the loss, a scalar; zero where the model has only losses that layers add.

        Args:
            batch: `(inputs, targets, sample_weight)` as far as given.
            outputs: The outputs of the model for the inputs.
        """
        if not keras_losses.flat_losses(self.model) and not keras_model.overridden(self.model, "compute_loss"):
            return tf.zeros((), keras.config.floatx())
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        value: tf.Tensor = keras_model.compute_loss(self.model, inputs, targets, outputs, weights, self.training)
        return value

    @contextlib.contextmanager
    def reduced(
        self,
        size: tf.Tensor,
        example_weight: tf.Tensor,
        num_examples: tf.Tensor,
        sum_divisors: Callable[[tf.Tensor], tf.Tensor],
    ) -> Iterator[None]:
        """Reduce the losses of part of a batch to their part of the loss of the global batch inside this context.

        Args:
            size: The number of examples of the part, an int64 scalar.
            example_weight: The weight of an example of the part: 1, or 0 in a padding batch.
            num_examples: The number of examples of the global batch, an int64 scalar.
            sum_divisors: Returns the divisor of the global batch for that of the part.
        """
        with (
            self.reduction.reduce_globally(self.training, [size], example_weight, num_examples, sum_divisors),
            keras_losses.without_added_losses(),
        ):
            yield

    def divisors(self, batch: Any, num_examples: tf.Tensor, call: Callable[[Any], Any]) -> tf.Tensor:
        """Return the divisors of the losses over a global batch, where masks or weights determine them.

        TensorFlow prunes all operations of the model but those that the masks depend on.

        Args:
            batch: The global batch.
            num_examples: Its size, an int64 scalar.
            call: Returns the outputs of the model for its inputs, each with its mask.

        Returns:
            float64 `[divisors]`.
        """
        found: list[tf.Tensor] = []

        def note(weight: tf.Tensor) -> tf.Tensor:
            found.append(tf.cast(weight, tf.float64))
            return weight

        one = tf.ones((), keras.config.floatx())
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope(), self.reduced(num_examples, one, num_examples, note), tf.device(self.device):
            self.value(batch, call(inputs))
        return tf.stack(found)
