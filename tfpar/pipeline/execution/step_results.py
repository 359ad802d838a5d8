"""The end of a step: penalties on weights, assignments of new states, updates of tracked losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_metrics
from tfpar._compat.variables.sharded_memory import shards_of
from tfpar.placement.weight_devices import follow_data
from tfpar.reduction.gradients.gradient_addition import plus


def add_penalties(model: keras.Model, gradients: dict[int, Any], scale: tf.Tensor) -> list[tf.Tensor]:
    """Return the penalties of weight regularizers, and add their gradients to the others.

    Args:
        model: A built model.
        gradients: The gradient of each trainable weight by the weight's `id`; changed in place.
        scale: The gradient with respect to the loss, a scalar.

    Returns:
        A scalar for each weight with a regularizer, or for each of its shards.
    """
    penalties = []
    penalized = [weight for weight in model.trainable_variables if weight.regularizer is not None]
    for variable in [shard for weight in penalized for shard in shards_of(weight)]:
        with tf.device(variable.value.device), tf.GradientTape() as tape:
            weight = variable.value.read_value()
            tape.watch(weight)
            penalty = tf.reduce_sum(variable.regularizer(weight))
            scaled = penalty * tf.cast(scale, penalty.dtype)
        gradient = tape.gradient(scaled, weight)
        if gradient is not None:
            gradients[id(variable)] = plus(gradients.get(id(variable)), gradient)
        penalties.append(penalty)
    return penalties


def assign_states(new_states: Sequence[tuple[keras.Variable, tf.Tensor]], after: Sequence[tf.Tensor]) -> None:
    """Assign new values to states, after all operations that read the old values.

    Args:
        new_states: Each state with its new value.
        after: Tensors to compute first.
    """
    with tf.control_dependencies([tf.group(*after)]), follow_data():
        for variable, value in new_states:
            variable.assign(value)


def add_to_metrics(sums: Sequence[tuple[keras.Variable, tf.Tensor]], after: Sequence[tf.Tensor]) -> None:
    """Add sums to metric variables. Call this after all assignments of the variables.

    Args:
        sums: Each variable with a sum.
        after: Tensors to compute first.
    """
    with tf.control_dependencies([tf.group(*after)]), follow_data():
        for variable, value in sums:
            variable.assign_add(value)


def update_loss_trackers(
    model: keras.Model, batch: Any, loss: tf.Tensor, num_examples: tf.Tensor, output_losses: Sequence[tf.Tensor]
) -> None:
    """Update the loss tracker, and those of the losses of outputs if Keras logs them.

    Args:
        model: A compiled model.
        batch: The global batch.
        loss: Its loss, a scalar.
        num_examples: Its size, an int64 scalar.
        output_losses: The loss of each output, scalars.
    """
    # Keras weights the loss of an output by the batch size if that is static, and otherwise by one.
    fixed_size = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None).shape[0]
    tracker = keras_metrics.loss_tracker(model)
    with tf.device(tracker.variables[0].value.device):
        tracker.update_state(loss, sample_weight=num_examples)
        for of_output, value in zip(keras_metrics.trackers_of_losses(model), output_losses, strict=True):
            of_output.update_state(value, sample_weight=fixed_size)
