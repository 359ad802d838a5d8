"""A wrong fusion of TensorFlow's oneDNN build on CPUs.

TensorFlow 2.21 computes the gradients of a kernel and of a bias in one operation where `Conv2DBackpropFilter` and
`BiasAddGrad` read the same gradient. It compares the operation that computes the gradient, but not which of its outputs
it is (`GetConv2DBackpropFilterOrBiasAddGrad` in tensorflow/core/common_runtime/mkl_layout_pass.cc): of two results of
one operation, it gives one layer the gradient of the other's bias. It does so for float32 and bfloat16, after all other
optimizations.
"""

from __future__ import annotations

import tensorflow as tf

_FUSED = (tf.float32, tf.bfloat16)
_RANKS = (None, 4)  # of the gradient that Conv2DBackpropFilter reads


def sole_output(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """Return one of several outputs of an operation as the only output of another, where oneDNN could confuse them.

    The graph optimizer removes `tf.identity`; `EnsureShape` it leaves. It copies nothing.

    Args:
        tensor: An output of an operation.
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
