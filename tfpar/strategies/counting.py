"""What the replicas of a step count in the states of metrics and layers, each example once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpar import _compat
from tfpar.strategies.single_device import update_metrics


@contextlib.contextmanager
def own_metrics_counted(model: keras.Model, counted: tf.Tensor) -> Iterator[None]:
    """Take back what layers add to metrics of theirs where another replica counts the examples."""
    states = [variable for metric in _compat.own_metrics(model) for variable in metric.variables]
    before = [tf.identity(variable.value) for variable in states]
    yield
    for variable, value in zip(states, before, strict=True):
        variable.assign(tf.where(counted > 0, variable.value, value))


def update_counted_metrics(model: keras.Model, loss: tf.Tensor, counted: tf.Tensor, *batch: Any) -> None:
    """Update the metrics with a replica's examples, unless another replica counts them."""

    def update() -> tf.Tensor:
        update_metrics(model, loss, counted, *batch)
        return tf.constant(True)

    tf.cond(counted > 0, update, lambda: tf.constant(False))


def own_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving statistics that each replica keeps from its own examples."""
    return [
        variable
        for layer in _compat.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
