"""The penalties of weight regularizers: computed once a step, on the device of each weight."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.tf_divided_memory import lasting_pieces
from tfpar.reduction.gradient_addition import plus


def add_penalties(model: keras.Model, gradients: dict[int, Any], scale: tf.Tensor) -> list[tf.Tensor]:
    """Return the penalties on a model's weights, and add their gradients to those of the other losses.

    Args:
        model: A built model.
        gradients: The gradient of each trainable weight by the weight's `id`; changed in place.
        scale: The gradient of one unit of loss, a scalar.

    Returns:
        A scalar for each weight with a regularizer, of a divided weight for each piece: the penalty is then a sum over
        the elements.
    """
    penalties = []
    penalized = [one for one in model.trainable_variables if one.regularizer is not None]
    for variable in [piece for one in penalized for piece in lasting_pieces(one)]:
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
