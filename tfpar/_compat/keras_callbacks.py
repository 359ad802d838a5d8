"""Private attributes of Keras 3.15 callbacks."""

from __future__ import annotations

import keras

# Attributes that are not state (keras/src/callbacks/callback.py). A callback with a monitor flips the sign of
# `min_delta` when it begins to compare, and again when a run resumes.
NOT_STATE = ("params", "_model", "min_delta")


def traces_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback profiles individual batches (keras/src/callbacks/tensorboard.py)."""
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback._should_trace)
