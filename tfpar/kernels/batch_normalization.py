"""Batch normalization with one operation of TensorFlow instead of Keras' chain of about twenty."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfpar._compat import tf_determinism

_TYPES = ("float32", "float16", "bfloat16")  # the kernel's statistics are float32
_LEAST_EPSILON = 1.001e-5  # cuDNN allows none below 1e-5
_NO_SECOND_DERIVATIVE = (
    "with fused kernels on several replicas, BatchNormalization(synchronized=True) has no second derivatives, which a "
    "penalty on gradients needs: pass fused=False to the trainer."
)


def suits(layer: Any, inputs: Any, mask: Any) -> bool:
    """Return whether the fused kernel computes what a BatchNormalization layer computes for inputs and their mask."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and isinstance(inputs, tf.Tensor)
        and mask is None
        and not layer.renorm
        and (inputs.shape.rank or 0) > 1
        and layer.axis in (-1, inputs.shape.rank - 1)
        and inputs.dtype.name == layer.compute_dtype
        and layer.compute_dtype in _TYPES
        and layer.variable_dtype == "float32"
        and layer.epsilon >= _LEAST_EPSILON
    )


def normalized(layer: Any, inputs: tf.Tensor, training: bool) -> tf.Tensor | None:
    """Return the outputs of a layer and update its moving statistics; None if TensorFlow has no suitable kernel.

    Args:
        layer: A layer for which `suits` is True.
        inputs: `[batch, ..., channels]`.
        training: Whether to use the statistics of the batch.
    """
    if inputs.shape.rank != 4:
        image = tf.reshape(inputs, [1, -1, 1, layer.moving_mean.shape[0]])  # cuDNN limits the size of a batch
        outputs = normalized(layer, image, training)
        inner = inputs.shape[1:]
        shape = [-1, *inner] if inner.is_fully_defined() else tf.shape(inputs)
        return None if outputs is None else tf.reshape(outputs, shape)
    scale = ops.cast(layer.gamma, "float32") if layer.scale else tf.ones([inputs.shape[-1]])
    offset = ops.cast(layer.beta, "float32") if layer.center else tf.zeros([inputs.shape[-1]])
    replica = tf.distribute.get_replica_context() if layer.synchronized else None
    is_joint = training and replica is not None and replica.num_replicas_in_sync > 1
    if training and not is_joint:
        return _by_batch(layer, inputs, scale, offset)
    if tf_determinism.is_enabled():  # on GPUs the gradient with fixed statistics has no deterministic kernel
        return None
    if is_joint:
        return _by_joint_batch(layer, inputs, scale, offset, replica)
    mean, variance = (ops.cast(moving, "float32") for moving in (layer.moving_mean, layer.moving_variance))
    return _with_statistics(layer, inputs, scale, offset, mean, variance)


def _by_batch(layer: Any, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Normalize by the statistics of the batch, and move the moving statistics towards them."""
    none = tf.zeros([0])
    result = tf.raw_ops.FusedBatchNormV3(
        x=inputs, scale=scale, offset=offset, mean=none, variance=none, epsilon=layer.epsilon, is_training=True
    )
    number = _num_positions(inputs)
    # The kernel returns the sample variance, divided by n - 1, which is undefined for a single position.
    _move(layer, result.batch_mean, tf.math.multiply_no_nan(result.batch_variance, (number - 1) / number))
    return result.y


def _by_joint_batch(layer: Any, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, replica: Any) -> tf.Tensor:
    """Normalize by the statistics of the global batch, with one all-reduce in each pass."""

    def over_replicas(*sums: tf.Tensor) -> list[tf.Tensor]:
        totals: list[tf.Tensor] = tf.unstack(replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(sums)))
        return totals

    values, positions = tf.cast(tf.stop_gradient(inputs), "float32"), [0, 1, 2]
    sums = tf.reduce_sum(values, positions), tf.reduce_sum(values**2, positions)
    total, total_squares, number = over_replicas(*sums, tf.fill(tf.shape(scale), _num_positions(inputs)))
    mean = total / number
    variance = tf.maximum(total_squares / number - mean**2, 0.0)
    _move(layer, mean, variance)

    @tf.custom_gradient
    def normalize(inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> Any:
            own = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream, x=inputs, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
                reserve_space_3=tf.zeros([0]), epsilon=layer.epsilon, is_training=False,
            )  # fmt: skip
            factor = scale * tf.math.rsqrt(variance + layer.epsilon) / number
            slope, constant = (factor * total for total in over_replicas(own.scale_backprop, own.offset_backprop))
            through_statistics = _with_statistics(layer, inputs, slope, constant, mean, variance)
            gradients = own.x_backprop - through_statistics, own.scale_backprop, own.offset_backprop
            return [tf.raw_ops.PreventGradient(input=result, message=_NO_SECOND_DERIVATIVE) for result in gradients]

        return _with_statistics(layer, inputs, scale, offset, mean, variance), gradient

    return normalize(inputs, scale, offset)


def _with_statistics(
    layer: Any, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tf.Tensor:
    return tf.raw_ops.FusedBatchNormV3(
        x=inputs, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=layer.epsilon, is_training=False
    ).y


def _num_positions(inputs: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), "float32")


def _move(layer: Any, mean: tf.Tensor, variance: tf.Tensor) -> None:
    """Move the statistics of a layer towards those of a batch, as Keras does."""
    for moving, of_batch in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = ops.cast(moving, "float32")
        moving.assign(before * layer.momentum + of_batch * (1.0 - layer.momentum))
