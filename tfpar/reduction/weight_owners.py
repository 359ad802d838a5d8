"""The bytes of weights that replicas own."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


def num_bytes(variable: keras.Variable) -> int:
    """Return the size of a variable.

    Args:
        variable: Any variable with a shape.

    Example:
        >>> num_bytes(keras.Variable(np.zeros([3, 4], "float32")))
        48
    """
    size: int = tf.as_dtype(variable.dtype).size
    return int(np.prod(variable.shape)) * size
