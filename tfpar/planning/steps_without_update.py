"""Training steps that compute the gradients of all weights, and leave the weights as they are.

An optimizer's update is measured by itself. Half of the operations of a deep model's step with Adam are those of its
update, so that a step without it is built in about two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_optimizer, tf_graph
from tfpar.strategies import Pipeline, SingleDevice


class DeviceWithoutUpdate(SingleDevice):
    """Steps on one device without the optimizer's update."""

    def _apply(self, model: keras.Model, gradients: list[Any]) -> None:
        _count_step(model, gradients)


class PipelineWithoutUpdate(Pipeline):
    """Steps of a pipeline without the optimizer's update."""

    def _update_of(self, model: keras.Model) -> Any:
        def count(gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> None:
            _count_step(model, gradients)

        return count


def _count_step(model: keras.Model, gradients: Sequence[Any]) -> None:
    """Wait for the gradients, and count the step."""
    parts = tf.nest.flatten([one for one in gradients if one is not None], expand_composites=True)
    with tf.control_dependencies(tf_graph.computed(parts)):
        keras_optimizer.count_application(model.optimizer)
