"""Patch the methods of Keras that fused kernels replace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras

from tfpar.kernels import batch_normalization, optimizer_updates

_OWN_CALL = keras.layers.BatchNormalization.call


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Compute each weight update and each batch normalization with one operation in this context.

    Keras' own code runs where TensorFlow has no such operation: for custom classes, for weights other than float32 and
    float64, and for masked batch normalization.

    Example:
        >>> weight, optimizer = keras.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5)
        >>> optimizer.build([weight])
        >>> with fused():
        ...     optimizer.apply([tf.constant([1.0, 1.0])], [weight])
        >>> weight.numpy().tolist()
        [0.5, 1.5]
    """
    with contextlib.ExitStack() as stack:
        for kind in optimizer_updates.REPLACED:
            stack.enter_context(mock.patch.object(kind, "update_step", _replacing(kind.update_step)))
        if keras.layers.BatchNormalization.call is _OWN_CALL:  # else another context replaces it
            stack.enter_context(mock.patch.object(keras.layers.BatchNormalization, "call", _normalize))
        yield


def _normalize(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    """Replace `BatchNormalization.call`, with its argument names, by which Keras calls a layer."""
    if batch_normalization.suits(self, inputs, mask):
        outputs = batch_normalization.normalized(self, inputs, bool(training and self.trainable))
        if outputs is not None:
            return outputs
    return _OWN_CALL(self, inputs, training=training, mask=mask)


def _replacing(original: Any) -> Any:
    """Return an `update_step` that updates a weight with one operation, or else calls the original."""

    def update_step(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not optimizer_updates.update(optimizer, gradient, variable, learning_rate):
            original(optimizer, gradient, variable, learning_rate)

    return update_step
