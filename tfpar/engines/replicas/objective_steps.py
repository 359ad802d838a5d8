"""Steps of a model with objectives on replicas: a loss reduction, an all-reduce and an update per objective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_losses
from tfpar.engines.replicas.gradient_sums import ReplicaGradients
from tfpar.reduction import objective
from tfpar.reduction.losses import BatchWeights

Run = Callable[..., Any]
Counting = Callable[[keras.Model, tf.Tensor], AbstractContextManager[None]]


def train(
    model: keras.Model,
    batch: Any,
    run: Run,
    sum_gradients: Callable[[keras.Model, ReplicaGradients], list[Any]],
    apply: Callable[[keras.Model, Any, list[keras.Variable], Any], None],
    metrics_counted_once: Counting,
) -> tf.Tensor:
    """Run one update per objective of a model; return the sum of their losses, a scalar.

    Args:
        model: A built and compiled model.
        batch: Batch of the step, `(batches, num_counted, example_weight, num_examples)`.
        run: Runs a function on every replica, as `ReplicaRuns.run` does.
        sum_gradients: Sums the gradients of the replicas, in replica context.
        apply: Applies an optimizer of the model to weights and their summed gradients.
        metrics_counted_once: Returns a context for a forward pass that updates the metrics of layers.
    """
    losses = []
    _, _, example_weight, _ = batch
    for index, current in enumerate(objective.objectives_of(model)):

        def on_replica(
            own: Any, num_counted: tf.Tensor, current: objective.Objective = current, index: int = index
        ) -> tuple[tf.Tensor, list[Any]]:
            with metrics_counted_once(model, num_counted):
                loss, gradients = objective.loss_and_gradients(model, current, own, _batch_weights(own, batch))
            weights = objective.trained_by(model, current)
            computed = ReplicaGradients(gradients, weights, (loss,), example_weight, num_counted, index)
            return loss, sum_gradients(model, computed)

        with keras_losses.local_losses():
            loss, gradients = run(model, on_replica, batch, training=True)
        apply(model, objective.optimizer_of(model, current), objective.trained_by(model, current), gradients)
        losses.append(loss)
    objective.count_step(model)
    return _update_metrics(model, losses, batch, run, training=True)


def evaluate(model: keras.Model, batch: Any, run: Run, metrics_counted_once: Counting) -> tf.Tensor:
    """Evaluate the objectives of a model and update their metrics; return the sum of their losses, a scalar.

    Args:
        model: A built and compiled model.
        batch: As for `train`.
        run: As for `train`.
        metrics_counted_once: As for `train`.
    """
    losses = []
    for current in objective.objectives_of(model):

        def on_replica(own: Any, num_counted: tf.Tensor, current: objective.Objective = current) -> tuple[tf.Tensor]:
            with metrics_counted_once(model, num_counted):
                return (objective.loss_of(current, own, False, _batch_weights(own, batch)),)

        with keras_losses.local_losses():
            losses += run(model, on_replica, batch, training=False)
    return _update_metrics(model, losses, batch, run, training=False)


def _batch_weights(own: Any, batch: Any) -> BatchWeights:
    _, _, example_weight, num_examples = batch
    return BatchWeights(example_weight, data.num_rows(own), num_examples)


def _update_metrics(model: keras.Model, losses: list[tf.Tensor], batch: Any, run: Run, *, training: bool) -> tf.Tensor:
    """Update the metrics of the objectives, each example on one replica; return the sum of the losses."""

    def on_replica(_: Any, num_counted: tf.Tensor) -> tuple[tf.Tensor]:
        def count() -> tf.Tensor:
            return objective.count(model, losses, num_counted)

        return (tf.cond(num_counted > 0, count, lambda: tf.add_n(losses)),)

    (total,) = run(model, on_replica, batch, training=training)
    return total
