"""Float32 products without TensorFloat-32, for comparisons of results.

TensorFloat-32, the default on GPUs since NVIDIA's Ampere, rounds the operands of matrix products and convolutions to 11
significant bits, a relative error of up to 5e-4. Libraries use it for some sizes only, so that the outputs for an
example depend on the batch size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products without TensorFloat-32 in this context, on all devices and in all threads.

    GPUs may still sum in another order, a relative difference of about 1e-6. Deterministic operations are not enabled,
    as they refuse random layers without a seed and layers without a deterministic kernel.

    Example:
        >>> with full_precision():
        ...     tf.config.experimental.tensor_float_32_execution_enabled()
        False
    """
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
