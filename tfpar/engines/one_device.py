"""One device, no communication: the baseline that every other engine must equal."""

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
from tfpar.reduction import metric_logs, objective, own_step
from tfpar.reduction.gradients.update_order import after_reads
from tfpar.reduction.losses import BatchWeights


class OneDevice(SingleReplica):
    """The steps of Keras' own `fit` on one device.

    Args:
        device: The device; None leaves the placement to TensorFlow.
    """

    chooses_xla = True
    runs_own_steps = True

    def __init__(self, device: str | None) -> None:
        self.device = device

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""
        return contextlib.nullcontext() if self.device is None else tf.device(self.device)

    @property
    def devices(self) -> list[str]:  # type: ignore[override]
        """The device."""
        return self.device_names

    @property
    def device_names(self) -> list[str]:
        """The device; without a name, the default of TensorFlow."""
        gpus = tf.config.list_logical_devices("GPU")
        return [self.device or ("GPU:0" if gpus else "CPU:0")]

    @property
    def step_device(self) -> str:
        """The device: the loop of steps runs on the host, and so would steps that request no device."""
        return self.device_names[0]

    def _holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is plain, and a weight on the named device, if any."""
        # Integers are not moved: TensorFlow places most of them on the host.
        if self.device is None or not tf.as_dtype(variable.dtype).is_floating:
            return super()._holds(variable)
        return super()._holds(variable) and keras_variables.is_on(variable, self.device)

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch, all of it for the device."""
        return StepBatch(element, self.device_names * len(tf.nest.flatten(element)))

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on a batch, or one for each objective; return the loss, a scalar."""
        with self.creation_scope():
            if own_step.overrides(model, "train"):
                return own_steps.run(model, "train", batch)
            if objective.objectives_of(model):
                return _train_objectives(model, batch)
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            if gradients:
                self._apply(model, gradients)
            update_metrics(model, loss, data.num_rows(inputs), inputs, targets, outputs, weights)
        return loss

    def _apply(self, model: keras.Model, gradients: list[Any]) -> None:
        """Run the optimizer."""
        with keras_optimizer.one_device_optimizer():
            keras_optimizer.apply(model.optimizer, gradients, model.trainable_variables)

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from a batch; return the loss, a scalar."""
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


# A divisor over the examples of one device is that of the whole batch.
_ALL = BatchWeights(partial_values=True, sum_divisors=lambda weight: weight)


def _train_objectives(model: keras.Model, batch: Any) -> tf.Tensor:
    """Do one update for each objective of a model, in their order; return the sum of their losses."""
    losses = []
    for one in objective.objectives_of(model):
        loss, gradients = objective.forward_backward(model, one, batch, _ALL)
        with keras_optimizer.one_device_optimizer():
            keras_optimizer.apply(objective.optimizer_of(model, one), gradients, objective.trained_by(model, one))
        losses.append(loss)
    if objective.counts_steps(model):
        keras_optimizer.count_application(model.optimizer)
    return objective.count(model, losses, data.num_rows(batch))


def _evaluate_objectives(model: keras.Model, batch: Any) -> tf.Tensor:
    losses = [objective.loss_of(one, batch, False, _ALL) for one in objective.objectives_of(model)]
    return objective.count(model, losses, data.num_rows(batch))


def forward_backward(model: keras.Model, inputs: Any, targets: Any, weights: Any) -> tuple[tf.Tensor, Any, list[Any]]:
    """Compute the loss, the outputs and the gradient of each trainable variable (scaled by the optimizer).

    Args:
        model: A built and compiled model.
        inputs: The inputs of the model, `[batch, ...]` each.
        targets: The targets of its losses, `[batch, ...]` each, or None.
        weights: Sample weights `[batch, ...]` or None.

    Returns:
        The loss (scalar), the outputs (`[batch, ...]` each) and the gradients, None for a variable without one.
    """
    loss, outputs, gradients = loss_and_gradients(model, inputs, targets, weights)
    return loss, outputs, after_reads(gradients, (loss, outputs), keras_model.recomputes(model))


def loss_and_gradients(
    model: keras.Model,
    inputs: Any,
    targets: Any,
    weights: Any,
    call: Callable[..., Any] = keras_model.call_model,
) -> tuple[tf.Tensor, Any, list[Any]]:
    """Do what `forward_backward` does, for a caller that reduces the gradients and then calls `after_reads`."""
    with tf.GradientTape() as tape:
        outputs = call(model, inputs, training=True)
        loss = keras_model.compute_loss(model, inputs, targets, outputs, weights, training=True)
        scaled = model.optimizer.scale_loss(loss)
    return loss, outputs, tape.gradient(scaled, [variable.value for variable in model.trainable_variables])


def forward(
    model: keras.Model, inputs: Any, targets: Any, weights: Any, call: Callable[..., Any] = keras_model.call_model
) -> tuple[tf.Tensor, Any]:
    """Compute the loss (scalar) and the outputs (`[batch, ...]` each) without training."""
    outputs = call(model, inputs, training=False)
    return keras_model.compute_loss(model, inputs, targets, outputs, weights, training=False), outputs


def update_metrics(
    model: keras.Model, loss: tf.Tensor, num_examples: tf.Tensor, inputs: Any, targets: Any, outputs: Any, weights: Any
) -> None:
    """Add examples to the model's metrics, the loss weighted by their number."""
    keras_metrics.loss_tracker(model).update_state(loss, sample_weight=num_examples)
    metric_logs.update_metrics(model, inputs, targets, outputs, weights, whole=not tf.distribute.has_strategy())
