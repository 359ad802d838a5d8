"""States of metrics and layers on replicas, in which each example counts once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.models import keras_metrics, keras_model
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.reduction import metric_logs, whole_batch
from tfpar.reduction.replicas import replica_id, sum_without_gradient
from tfpar.reduction.verdict import Verdict


@contextlib.contextmanager
def layer_metrics_counted_once(model: keras.Model, num_counted: tf.Tensor) -> Iterator[None]:
    """Restore the metrics of layers after this context if another replica counts these examples."""
    states = [variable for metric in keras_metrics.own_metrics(model) for variable in metric.variables]
    before = [tf.identity(variable.value) for variable in states]
    yield
    for variable, value in zip(states, before, strict=True):
        variable.assign(tf.where(num_counted > 0, variable.value, value))


def update_metrics_once(
    model: keras.Model, loss: tf.Tensor, num_counted: tf.Tensor, batch: Sequence[Any], verdict: Verdict
) -> None:
    """Update the metrics with the per-replica batch, unless another replica counts its examples.

    Metrics that need the whole batch are updated on the first replica, with the rows that all replicas gather.

    Args:
        model: A compiled model.
        loss: The global loss.
        num_counted: Number of examples of this replica to count.
        batch: `(inputs, targets, outputs, sample_weight)` of this replica.
        verdict: The verdict of the study.
    """
    with_all_rows = metric_logs.whole_metrics(model, verdict)

    def update() -> tf.Tensor:
        keras_metrics.loss_tracker(model).update_state(loss, sample_weight=num_counted)
        if not verdict.whole_metrics:
            with metric_logs.not_updated(with_all_rows):
                metric_logs.update_metrics(model, *batch, whole=False)
        return tf.constant(True)

    with tf.device(HOST):  # otherwise the host would wait for the device before it launches a branch
        counts_here = num_counted > 0
    tf.cond(counts_here, update, lambda: tf.constant(False))
    if with_all_rows:
        inputs = whole_batch.gather_for_loss(batch[0]) if verdict.reads_inputs else batch[0]
        _update_by_first(model, with_all_rows, (inputs, *whole_batch.gather_for_loss(tuple(batch[1:]))))


def _update_by_first(model: keras.Model, metrics: Sequence[keras.Metric], batch: Sequence[Any]) -> None:
    others = metric_logs.other_metrics(model, metrics)
    if replica_id() == 0:
        with whole_batch.holding_all_rows(counts_once=True), metric_logs.not_updated(others):
            metric_logs.update_metrics(model, *batch, whole=False)


def own_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving statistics that each replica computes from its own examples."""
    return [
        variable
        for layer in keras_model.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        for variable in (layer.moving_mean, layer.moving_variance)
    ]


def summed_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the metric variables that are sums over the replicas."""
    unique = {id(variable): variable for metric in metric_logs.all_metrics(model) for variable in metric.variables}
    return [variable for variable in unique.values() if tf_distribute.is_summed_on_read(variable)]


def local_states(strategy: tf.distribute.Strategy, variable: keras.Variable) -> np.ndarray:
    """Return the values of a variable on the local replicas, `[replicas, ...]`."""
    return np.stack([copy.read_value().numpy() for copy in strategy.experimental_local_results(variable.value)])


def assign_local_states(strategy: tf.distribute.Strategy, variable: keras.Variable, states: np.ndarray) -> None:
    """Assign the first rows of `states` to the copies of a variable on the local replicas."""
    for copy, state in zip(strategy.experimental_local_results(variable.value), states, strict=False):
        copy.assign(state)


def average_statistics(strategy: tf.distribute.Strategy, statistics: Sequence[keras.Variable]) -> None:
    """Set moving statistics, with a separate value on each replica, to their mean over all replicas."""

    def average() -> None:
        values = [variable.value.read_value() for variable in statistics]
        means = tf.distribute.get_replica_context().all_reduce("MEAN", values)
        for variable, mean in zip(statistics, means, strict=True):
            variable.value.assign(mean)

    if statistics:
        strategy.run(average)


def average_by_examples(states: Sequence[keras.Variable], fraction: tf.Tensor) -> None:
    """Set states of layers to their mean over all examples of the global batch, in replica context.

    Args:
        states: Variables with a separate value on each replica.
        fraction: Fraction of the global batch on this replica, a scalar.
    """
    for state in states:
        value = tf.convert_to_tensor(state.value)
        state.value.assign(sum_without_gradient(value * tf.cast(fraction, value.dtype)))
