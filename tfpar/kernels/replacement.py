"""The methods of Keras that fused kernels replace while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tfpar.kernels import optimizer_updates


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Compute updates of weights with one operation each inside this context, where TensorFlow has one.

    A class of a user's own, sparse gradients and other types than float32 and float64 have Keras' own update.

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
        yield


def _replacing(own: Any) -> Any:
    """Return the method that updates a weight with one operation, or else as before."""

    def update_step(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not optimizer_updates.update(optimizer, gradient, variable, learning_rate):
            own(optimizer, gradient, variable, learning_rate)

    return update_step
