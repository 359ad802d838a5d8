"""Steps on one device: the baseline that every other engine must reproduce."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_metrics, keras_model
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.variables import keras_variables
from tfpar.engines import own_steps
from tfpar.engines.single_replica import SingleReplica
from tfpar.engines.steps.batches_ahead import StepBatch
from tfpar.recomputation.choice import Recompute
from tfpar.reduction import metric_logs, objective, own_step
from tfpar.reduction.gradients.update_order import after_reads
from tfpar.reduction.losses import BatchWeights


class OneDevice(SingleReplica):
    """The engine of `SingleDevice`, with the steps of Keras' own `fit`.

    Args:
        device: Device name; None leaves the placement to TensorFlow.
        recompute: The layers to recompute.
    """

    chooses_xla = True
    runs_own_steps = True

    def __init__(self, device: str | None, recompute: Recompute = False) -> None:
        self.device, self.recompute = device, recompute

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that places variables on the device, if it has a name."""
        return contextlib.nullcontext() if self.device is None else tf.device(self.device)

    @property
    def devices(self) -> list[str]:  # type: ignore[override]
        """The device; without a name, TensorFlow's default."""
        gpus = tf.config.list_logical_devices("GPU")
        return [self.device or ("GPU:0" if gpus else "CPU:0")]

    @property
    def step_device(self) -> str:
        """The device; otherwise the steps would run on the host, as the loop around them does."""
        return self.device_names[0]

    def _holds(self, variable: keras.Variable) -> bool:
        """Return True if a variable is plain and, with a named device, allocated there."""
        # Integers are not moved, as TensorFlow places most of them on the host.
        if self.device is None or not tf.as_dtype(variable.dtype).is_floating:
            return super()._holds(variable)
        return super()._holds(variable) and keras_variables.is_on(variable, self.device)

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch, read by the device."""
        return StepBatch(element, self.device_names * len(tf.nest.flatten(element)))

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Run one update on a batch, or one per objective; return the loss, a scalar."""
        with self.creation_scope():
            if own_step.overrides(model, "train"):
                loss = own_steps.run(model, "train", batch)
                objective.count_step(model)
                return loss
            if objective.objectives_of(model):
                return _train_objectives(model, batch)
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            if gradients:
                with keras_optimizer.one_device_optimizer():
                    keras_optimizer.apply(model.optimizer, gradients, model.trainable_variables)
            update_metrics(model, loss, data.num_rows(inputs), inputs, targets, outputs, weights)
        return loss

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average, if the optimizer has one."""
        with keras_optimizer.one_device_optimizer():
            for optimizer, variables in objective.updates_of(model):
                optimizer.finalize_variable_values(variables)

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the metrics with a batch; return the loss, a scalar."""
        with self.creation_scope():
            if own_step.overrides(model, "evaluate"):
                return own_steps.run(model, "evaluate", batch)
            if objective.objectives_of(model):
                return _evaluate_objectives(model, batch)
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            loss, outputs = forward(model, inputs, targets, weights)
            update_metrics(model, loss, data.num_rows(inputs), inputs, targets, outputs, weights)
        return loss

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each."""
        with self.creation_scope():
            if own_step.overrides(model, "predict"):
                return own_step.call(model, "predict", batch)
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return keras_model.call_model(model, inputs, training=False)


# One device has the whole batch, so divisors need no sum.
WHOLE_BATCH = BatchWeights(partial_values=True, sum_divisors=lambda weight: weight)


def _train_objectives(model: keras.Model, batch: Any) -> tf.Tensor:
    """Run one update per objective of a model, in order; return the sum of their losses."""
    losses = []
    for current in objective.objectives_of(model):
        loss, gradients = objective.forward_backward(model, current, batch, WHOLE_BATCH)
        optimizer, weights = objective.optimizer_of(model, current), objective.trained_by(model, current)
        with keras_optimizer.one_device_optimizer():
            keras_optimizer.apply(optimizer, gradients, weights)
        losses.append(loss)
    objective.count_step(model)
    return objective.count(model, losses, data.num_rows(batch))


def _evaluate_objectives(model: keras.Model, batch: Any) -> tf.Tensor:
    losses = [objective.loss_of(each, batch, False, WHOLE_BATCH) for each in objective.objectives_of(model)]
    return objective.count(model, losses, data.num_rows(batch))


def forward_backward(model: keras.Model, inputs: Any, targets: Any, weights: Any) -> tuple[tf.Tensor, Any, list[Any]]:
    """Compute the loss, the outputs and the gradients of a batch.

    Args:
        model: A built and compiled model.
        inputs: Inputs of the model, `[batch, ...]` each.
        targets: Targets of the losses, `[batch, ...]` each, or None.
        weights: Sample weights, `[batch, ...]`, or None.

    Returns:
        `(loss, outputs, gradients)`: a scalar, `[batch, ...]` each, and a gradient per trainable variable, scaled by
        the optimizer; None for a variable without a gradient.
    """
    loss, outputs, gradients = loss_and_gradients(model, inputs, targets, weights)
    return loss, outputs, after_reads(gradients, (loss, outputs))


def loss_and_gradients(
    model: keras.Model,
    inputs: Any,
    targets: Any,
    weights: Any,
    call: Callable[..., Any] = keras_model.call_model,
) -> tuple[tf.Tensor, Any, list[Any]]:
    """Compute what `forward_backward` does, without `after_reads`, for callers that first reduce the gradients."""
    with tf.GradientTape() as tape:
        outputs = call(model, inputs, training=True)
        loss = keras_model.compute_loss(model, inputs, targets, outputs, weights, training=True)
        scaled = model.optimizer.scale_loss(loss)
    return loss, outputs, tape.gradient(scaled, [variable.value for variable in model.trainable_variables])


def forward(
    model: keras.Model, inputs: Any, targets: Any, weights: Any, call: Callable[..., Any] = keras_model.call_model
) -> tuple[tf.Tensor, Any]:
    """Compute the loss, a scalar, and the outputs, `[batch, ...]` each, in inference mode."""
    outputs = call(model, inputs, training=False)
    return keras_model.compute_loss(model, inputs, targets, outputs, weights, training=False), outputs


def update_metrics(
    model: keras.Model, loss: tf.Tensor, num_examples: tf.Tensor, inputs: Any, targets: Any, outputs: Any, weights: Any
) -> None:
    """Update the metrics of a model with a batch, and the mean loss weighted by its number of examples."""
    keras_metrics.loss_tracker(model).update_state(loss, sample_weight=num_examples)
    metric_logs.update_metrics(model, inputs, targets, outputs, weights, whole=not tf.distribute.has_strategy())
