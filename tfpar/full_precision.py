"""Products in the precision of their type while results are compared.

TensorFloat-32, the default for float32 on GPUs since NVIDIA's Ampere, rounds the factors of matrix products and
convolutions to 11 significant bits, a relative error of up to 5e-4. Libraries use it for some sizes and not for others,
so that the same example has other outputs in a larger batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products without TensorFloat-32 inside this context, on all devices and in all threads.

    Sums of a GPU in another order stay: they differ by about 1e-6, and the comparisons allow 3e-4. Deterministic
    operations instead would refuse random layers without a seed, and layers that have no deterministic kernel.

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
