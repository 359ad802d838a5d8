"""The choice of deterministic operations, and TensorFlow's clock, which is refused with it.

Written for TensorFlow 2.21, which exports a function to choose them, and none to read or to suspend the choice. Its
`tf.timestamp` fails while they are chosen, in functions traced before too.
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
    """Let operations run inside this context that are not deterministic, such as the clock of a measurement."""
    if not is_enabled():
        yield
        return
    config.disable_op_determinism()
    try:
        yield
    finally:
        config.enable_op_determinism()
