"""Workaround for an incorrect oneDNN fusion on CPUs.

TensorFlow 2.21 fuses `Conv2DBackpropFilter` and `BiasAddGrad` if they read the same gradient. It compares the op that
computes the gradient, but not the index of its output (`GetConv2DBackpropFilterOrBiasAddGrad` in
tensorflow/core/common_runtime/mkl_layout_pass.cc). So if an op computes two gradients, a layer may get the bias
gradient of another one. The fusion affects float32 and bfloat16, and runs after all other optimizations.
"""

from __future__ import annotations

import tensorflow as tf

_FUSED = (tf.float32, tf.bfloat16)
_RANKS = (None, 4)  # of the gradient


def sole_output(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """Return a tensor as the only output of an op, if oneDNN could confuse it with other outputs of its op.

    It uses `EnsureShape`, which copies nothing, because the graph optimizer removes `tf.identity`.

    Args:
        tensor: An output of an op.
        device: The device that holds it.

    Example:
        >>> first, second = tf.split(tf.zeros([2, 8, 8, 4]), 2)
        >>> sole_output(first, "CPU:0").shape
        TensorShape([1, 8, 8, 4])
    """
    if "GPU" in device or tensor.dtype not in _FUSED or tensor.shape.rank not in _RANKS:
        return tensor
    with tf.device(device):
        return tf.ensure_shape(tensor, tensor.shape)
