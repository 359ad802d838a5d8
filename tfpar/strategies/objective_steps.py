"""Objectives on replicas: for each, one reduction of its loss, one all-reduce of gradients and one update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model
from tfpar.reduction import objective
from tfpar.reduction.losses import BatchWeights

Run = Callable[..., Any]
Counting = Callable[[keras.Model, tf.Tensor], AbstractContextManager[None]]


def train(
    model: keras.Model,
    batch: Any,
    run: Run,
    sum_gradients: Callable[[keras.Model, list[Any], tf.Tensor, tf.Tensor, int], list[Any]],
    apply: Callable[[Any, list[keras.Variable], Any], None],
    metrics_counted: Counting,
) -> tf.Tensor:
    """Do one update for each objective of a model; return the sum of their losses, a scalar.

    Args:
        model: A built and compiled model.
        batch: An element of the distributed dataset, `(parts, sizes, share, num_examples)`.
        run: Runs a function on every replica's part, as `DataParallel` does.
        sum_gradients: Sums gradients over all replicas, in replica context; takes what an example counts, how
            many of them the replica counts, and the number of the objective.
        apply: Runs an optimizer on every replica with weights and their summed gradients.
        metrics_counted: The context in which a replica's forward pass updates metrics of layers.
    """
    losses = []
    _, _, share, _ = batch
    for number, one in enumerate(objective.objectives_of(model)):

        def on_replica(
            part: Any, counted: tf.Tensor, one: objective.Objective = one, number: int = number
        ) -> tuple[tf.Tensor, list[Any]]:
            with metrics_counted(model, counted):
                loss, gradients = objective.forward_backward(model, one, part, _counts(part, batch))
            return loss, sum_gradients(model, gradients, share, counted, number)

        with keras_model.local_losses():
            loss, gradients = run(model, on_replica, batch, training=True)
        apply(objective.optimizer_of(model, one), objective.trained_by(model, one), gradients)
        losses.append(loss)
    if objective.counts_steps(model):
        model.optimizer.iterations.assign_add(1)
    return _count(model, losses, batch, run, training=True)


def evaluate(model: keras.Model, batch: Any, run: Run, metrics_counted: Counting) -> tf.Tensor:
    """Count the losses of a model's objectives over the parts of a batch; return their sum, a scalar.

    Args:
        model: A built and compiled model.
        batch: An element of the distributed dataset.
        run: Runs a function on every replica's part.
        metrics_counted: The context in which a replica's forward pass updates metrics of layers.
    """
    losses = []
    for one in objective.objectives_of(model):

        def on_replica(part: Any, counted: tf.Tensor, one: objective.Objective = one) -> tuple[tf.Tensor]:
            with metrics_counted(model, counted):
                return (objective.loss_of(one, part, False, _counts(part, batch)),)

        with keras_model.local_losses():
            losses += run(model, on_replica, batch, training=False)
    return _count(model, losses, batch, run, training=False)


def _counts(part: Any, batch: Any) -> BatchWeights:
    _, _, share, num_examples = batch
    return BatchWeights(share, data.num_rows(part), num_examples)


def _count(model: keras.Model, losses: list[tf.Tensor], batch: Any, run: Run, *, training: bool) -> tf.Tensor:
    """Count the losses on every replica for its own examples, unless another replica counts them."""

    def on_replica(part: Any, counted: tf.Tensor) -> tuple[tf.Tensor]:
        def count() -> tf.Tensor:
            return objective.count(model, losses, counted)

        return (tf.cond(counted > 0, count, lambda: tf.add_n(losses)),)

    (total,) = run(model, on_replica, batch, training=training)
    return total
