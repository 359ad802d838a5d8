"""The choice of deterministic operations.

Written for TensorFlow 2.21, which exports a function to choose them, and none to read the choice.
"""

from __future__ import annotations

from tensorflow.python.framework import config


def is_enabled() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called."""
    return bool(config.is_op_determinism_enabled())
