"""Variables that no `tf.distribute` strategy replicates.

Written for TensorFlow 2.21, which replicates every `tf.Variable` that is created in the scope of a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context


def anonymous_handle(dtype: tf.DType, shape: Sequence[int | None] = ()) -> tf.Tensor:
    """Return the handle of a new variable on the current device.

    TensorFlow frees an anonymous variable with the last tensor or function that holds its handle
    (`MakeRefCountedHandle` in tensorflow/core/framework/resource_mgr.h). A Python finalizer could run while a graph is
    built, and deadlock on the lock of that graph.

    Args:
        dtype: The dtype of the variable.
        shape: The shape of the variable. Defaults to a scalar.
    """
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=context.anonymous_name())
