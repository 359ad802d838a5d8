"""Private parts of Keras' callbacks. Written for Keras 3.15."""

from __future__ import annotations

import keras

# Attributes of every callback that are not its state (keras/src/callbacks/callback.py); a callback with a monitor
# turns the sign of `min_delta` when it begins to compare, and does so again when a run resumes.
NOT_STATE = ("params", "_model", "min_delta")


def traces_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback profiles single batches (keras/src/callbacks/tensorboard.py)."""
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback._should_trace)
