"""Objectives on replicas: for each, one reduction of its loss, one all-reduce of gradients and one update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_losses
from tfpar._compat.optimizers import keras_optimizer
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
    """Run one update for each objective of a model; return the sum of their losses, a scalar.

    Args:
        model: A built and compiled model.
        batch: An element of the distributed dataset, `(parts, num_counted, example_weight, num_examples)`.
        run: Runs a function on every replica with its per-replica batch, as `DataParallel` does.
        sum_gradients: All-reduces the gradients of a replica, in replica context.
        apply: Applies an optimizer of the model to weights with their reduced gradients.
        metrics_counted_once: The context for a forward pass of a replica, in which layers update metrics.
    """
    losses = []
    _, _, example_weight, _ = batch
    for number, one in enumerate(objective.objectives_of(model)):

        def on_replica(
            part: Any, num_counted: tf.Tensor, one: objective.Objective = one, number: int = number
        ) -> tuple[tf.Tensor, list[Any]]:
            with metrics_counted_once(model, num_counted):
                loss, gradients = objective.loss_and_gradients(model, one, part, _counts(part, batch))
            return loss, sum_gradients(
                model,
                ReplicaGradients(
                    gradients, objective.trained_by(model, one), (loss,), example_weight, num_counted, number
                ),
            )

        with keras_losses.local_losses():
            loss, gradients = run(model, on_replica, batch, training=True)
        apply(model, objective.optimizer_of(model, one), objective.trained_by(model, one), gradients)
        losses.append(loss)
    if objective.counts_steps(model):
        keras_optimizer.count_application(model.optimizer)
    return _count(model, losses, batch, run, training=True)


def evaluate(model: keras.Model, batch: Any, run: Run, metrics_counted_once: Counting) -> tf.Tensor:
    """Evaluate the objectives of a model on a batch and update their metrics; return the sum of their losses, a scalar.

    Args:
        model: A built and compiled model.
        batch: An element of the distributed dataset.
        run: Runs a function on every replica with its per-replica batch.
        metrics_counted_once: The context for a forward pass of a replica, in which layers update metrics.
    """
    losses = []
    for one in objective.objectives_of(model):

        def on_replica(part: Any, num_counted: tf.Tensor, one: objective.Objective = one) -> tuple[tf.Tensor]:
            with metrics_counted_once(model, num_counted):
                return (objective.loss_of(one, part, False, _counts(part, batch)),)

        with keras_losses.local_losses():
            losses += run(model, on_replica, batch, training=False)
    return _count(model, losses, batch, run, training=False)


def _counts(part: Any, batch: Any) -> BatchWeights:
    _, _, example_weight, num_examples = batch
    return BatchWeights(example_weight, data.num_rows(part), num_examples)


def _count(model: keras.Model, losses: list[tf.Tensor], batch: Any, run: Run, *, training: bool) -> tf.Tensor:
    """Update the metrics of the objectives on every replica, each example on one replica alone."""

    def on_replica(part: Any, num_counted: tf.Tensor) -> tuple[tf.Tensor]:
        def count() -> tf.Tensor:
            return objective.count(model, losses, num_counted)

        return (tf.cond(num_counted > 0, count, lambda: tf.add_n(losses)),)

    (total,) = run(model, on_replica, batch, training=training)
    return total
