"""Variables outside of the scope of any `tf.distribute` strategy.

Written for TensorFlow 2.21, where each `tf.Variable` that is created in the scope of a strategy becomes one variable on
each of its replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context


def anonymous_handle(dtype: tf.DType, shape: Sequence[int | None] = ()) -> tf.Tensor:
    """Return the handle of a new variable on the device of the scope.

    TensorFlow names an anonymous variable itself, and frees it with the last tensor and function that hold its handle
    (`MakeRefCountedHandle` in tensorflow/core/framework/resource_mgr.h). A finalizer in Python could run while a graph
    is built, and wait for the lock of that graph without end.

    Args:
        dtype: The type of its value.
        shape: The shape of its value; that of a scalar by default.
    """
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=context.anonymous_name())
