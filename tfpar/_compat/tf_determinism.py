"""Op determinism, which TensorFlow 2.21 exports a function to enable, but none to query or suspend.

While it is enabled, `tf.timestamp` fails, even in functions traced before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python.framework import config


def is_enabled() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called, or `TF_DETERMINISTIC_OPS` is set."""
    return bool(config.is_op_determinism_enabled())


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Allow nondeterministic ops in this context, such as the clock of a measurement."""
    if not is_enabled():
        yield
        return
    config.disable_op_determinism()
    try:
        yield
    finally:
        config.enable_op_determinism()
