"""Operations on one device by itself, compared with NumPy.

The operands are small whole numbers, so that the right result is exact in float32, and in TensorFloat-32 too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.checks.child_program import at_stage
from tfpar.messages.reasons import message_of

_SIZE, _CHANNELS, _IMAGE = 256, 8, 24
_ALLOWED = 0.25  # an algorithm of cuDNN may compute with fractions; the right result is whole


def examine(device: str) -> dict[str, Any]:
    """Run a product, a convolution and a function compiled with XLA on one device.

    Args:
        device: A short name.

    Returns:
        For each operation the largest error, the number of wrong values and the seconds of the first call; or the
        message of its error.
    """
    return {name: _tried(name, operation, device) for name, operation in OPERATIONS.items()}


def _tried(name: str, operation: Callable[[str], tuple[np.ndarray, np.ndarray]], device: str) -> dict[str, Any]:
    at_stage(name)
    begin = time.perf_counter()
    try:
        actual, expected = operation(device)
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {' '.join(message_of(error).split())[:300]}"}
    errors = np.abs(actual.astype("float64") - expected)
    wrong = ~(errors <= (_ALLOWED if name == "convolution" else 0.0))  # NaN is wrong
    return {
        "num_wrong": int(wrong.sum()),
        "num_values": int(wrong.size),
        "largest_error": float(np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max()),
        "seconds": time.perf_counter() - begin,
    }


def product(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a product of two matrices, and the right one."""
    left, right = _whole(_SIZE, _SIZE), _whole(_SIZE, _SIZE)
    return _on(device, lambda: tf.constant(left) @ tf.constant(right)), left.astype("float64") @ right


def convolution(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a convolution of images with 3x3 filters, and the right one."""
    images, filters = _whole(4, _IMAGE, _IMAGE, _CHANNELS), _whole(3, 3, _CHANNELS, _CHANNELS)
    windows = np.lib.stride_tricks.sliding_window_view(images.astype("float64"), (3, 3), axis=(1, 2))
    expected = np.einsum("bijchw,hwcd->bijd", windows, filters)
    return _on(device, lambda: tf.nn.conv2d(tf.constant(images), tf.constant(filters), 1, "VALID")), expected


def compiled(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of a function that XLA compiles for the device, and the right one."""
    values = _whole(_SIZE, _SIZE)

    @tf.function(jit_compile=True)
    def function(given: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.maximum(given * 3.0 + 1.0, 0.0), axis=1)

    return _on(device, lambda: function(tf.constant(values))), np.maximum(values * 3.0 + 1.0, 0.0).sum(1)


OPERATIONS: dict[str, Callable[[str], tuple[np.ndarray, np.ndarray]]] = {
    "product": lambda device: product(device),
    "convolution": lambda device: convolution(device),
    "XLA": lambda device: compiled(device),
}


def _on(device: str, compute: Callable[[], tf.Tensor]) -> np.ndarray:
    with tf.device(device):
        result: np.ndarray = compute().numpy()
        return result


def _whole(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype("float32")
