"""Batch normalization by one operation of TensorFlow, where Keras has a chain of about twenty."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfpar._compat import tf_determinism

_TYPES = ("float32", "float16", "bfloat16")  # of the kernel, whose statistics are float32
_LEAST_EPSILON = 1.001e-5  # cuDNN has none below 1e-5


def suits(layer: Any, inputs: Any, mask: Any) -> bool:
    """Return whether one operation normalizes inputs as a layer does.

    Args:
        layer: A BatchNormalization.
        inputs: A tensor.
        mask: Of the inputs; None for none.
    """
    return (
        type(layer) is keras.layers.BatchNormalization
        and isinstance(inputs, tf.Tensor)
        and mask is None
        and not (layer.synchronized or layer.renorm)
        and inputs.shape.rank == 4
        and layer.axis in (-1, 3)
        and inputs.dtype.name == layer.compute_dtype
        and layer.compute_dtype in _TYPES
        and layer.variable_dtype == "float32"
        and layer.epsilon >= _LEAST_EPSILON
    )


def normalized(layer: Any, inputs: tf.Tensor, training: bool) -> tf.Tensor | None:
    """Return the outputs of a layer, and update its moving statistics; None where TensorFlow's kernel is not for it.

    Args:
        layer: A layer that `suits`.
        inputs: `[batch, height, width, channels]`.
        training: Whether to use the statistics of the batch.
    """
    mean, variance = (ops.cast(one, "float32") for one in (layer.moving_mean, layer.moving_variance))
    scale = ops.cast(layer.gamma, "float32") if layer.scale else tf.ones_like(mean)
    offset = ops.cast(layer.beta, "float32") if layer.center else tf.zeros_like(mean)
    if training:
        return _by_batch(layer, inputs, scale, offset, mean, variance)
    if tf_determinism.is_enabled():  # on GPUs its gradient has no deterministic kernel
        return None
    return tf.raw_ops.FusedBatchNormV3(
        x=inputs, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=layer.epsilon, is_training=False
    ).y


def _by_batch(
    layer: Any, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tf.Tensor:
    """Return outputs by the statistics of a batch, with which the moving ones change as in Keras."""
    none = tf.zeros([0])
    found = tf.raw_ops.FusedBatchNormV3(
        x=inputs, scale=scale, offset=offset, mean=none, variance=none, epsilon=layer.epsilon, is_training=True
    )
    number = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), "float32")
    # The variance of the kernel is for a sample, a sum over n - 1; that of a single position may be anything.
    of_batch = tf.math.multiply_no_nan(found.batch_variance, (number - 1) / number)
    layer.moving_mean.assign(mean * layer.momentum + found.batch_mean * (1.0 - layer.momentum))
    layer.moving_variance.assign(variance * layer.momentum + of_batch * (1.0 - layer.momentum))
    return found.y
