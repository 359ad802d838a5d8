"""`tfpar.fit`: the drop-in for `model.fit` of a model that already exists."""

from __future__ import annotations

from typing import Any

import keras

from tfpar import strategies
from tfpar.trainer import Trainer


def fit(model: keras.Model, x: Any, y: Any = None, **arguments: Any) -> keras.callbacks.History:
    """Train a model under the strategy in whose scope it was built; the drop-in for `model.fit(x, y, …)`.

    Args:
        model: A compiled model, built under `tf.distribute.MirroredStrategy().scope()`, under the scope of a tfpar
            strategy, or under none.
        x: A `tf.data.Dataset` batched to the global batch, or arrays `[examples, ...]`.
        y: Targets `[examples, ...]` where `x` is arrays.
        **arguments: As for `tfpar.Trainer.fit`, which takes those of `keras.Model.fit`.

    Returns:
        The history of logs, one entry an epoch.

    Raises:
        TypeError: If the model is not compiled, or was built under a strategy that tfpar does not know.
        ValueError: As `tfpar.Trainer.fit`.

    Example:
        >>> with tf.distribute.MirroredStrategy().scope():
        ...     model = build_model()
        >>> tfpar.fit(model, dataset, epochs=5)
    """
    # Kept on the model, and so for as long as it lives: a second call runs what the first one compiled.
    if not isinstance(model, keras.Model):
        raise TypeError(f"tfpar.fit trains a compiled keras.Model, received {type(model).__name__}.")
    trainer = getattr(model, "_tfpar_trainer", None)
    if trainer is None:
        trainer = model._tfpar_trainer = Trainer(lambda: model, strategies.of(model), seed=None)
    history: keras.callbacks.History = trainer.fit(x, y, **arguments)
    return history
