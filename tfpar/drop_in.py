"""`tfpar.fit`, `tfpar.evaluate` and `tfpar.predict`: drop-in replacements for the methods of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras

from tfpar.loops import model_methods
from tfpar.messages import keyword_arguments
from tfpar.strategies import SingleDevice, model_scopes
from tfpar.strategies.resolve import print_unused_devices
from tfpar.trainer import Trainer

# So that `model.fit` of a model built in the scope of a tfpar strategy trains under it too.
model_scopes.give_methods = functools.partial(model_methods.give_methods, make_trainer=Trainer)


def fit(model: keras.Model, *data: Any, **settings: Any) -> keras.callbacks.History:
    """Train a model under the strategy in whose scope it was built, in place of `model.fit`.

    A model that belongs to a `tfpar.Trainer` trains under that trainer's strategy.

    Args:
        model: A compiled model, built in the scope of a `tf.distribute` or tfpar strategy, or in no scope.
        *data: As for `tfpar.Trainer.fit`: a `tf.data.Dataset` batched to the global batch size, or arrays
            `[examples, ...]` and their targets.
        **settings: As for `tfpar.Trainer.fit`.

    Returns:
        The history, with one entry per epoch.

    Raises:
        TypeError: If `model` is not a model, or was built under a strategy that tfpar does not support.
        ValueError: As for `tfpar.Trainer.fit`.

    Example:
        >>> with tf.distribute.MirroredStrategy().scope():
        ...     model = build_model()
        >>> tfpar.fit(model, dataset, epochs=5)
    """
    trainer = _trainer_of(model, "fit", settings)
    is_default = isinstance(trainer.strategy, SingleDevice) and model_scopes.noted_strategy(model) is None
    if model._tfpar_trainer is trainer and is_default:
        print_unused_devices(
            "tfpar.fit",
            "since the model was built outside of a strategy's scope",
            "tfpar.Trainer(model, tfpar.Mirrored()).fit(...)",
        )
    history: keras.callbacks.History = trainer.fit(*data, **settings)
    return history


def evaluate(model: keras.Model, *data: Any, **settings: Any) -> Any:
    """Return the loss and metrics of a model under its strategy, in place of `model.evaluate`.

    Args:
        model: A compiled model, as for `tfpar.fit`.
        *data: As for `tfpar.Trainer.evaluate`.
        **settings: As for `tfpar.Trainer.evaluate`.

    Returns:
        The loss, or a list or dict of the loss and metrics.

    Raises:
        TypeError: As for `tfpar.fit`.
        ValueError: As for `tfpar.Trainer.evaluate`.

    Example:
        >>> tfpar.evaluate(model, validation, return_dict=True)
    """
    return _trainer_of(model, "evaluate", settings).evaluate(*data, **settings)


def predict(model: keras.Model, *data: Any, **settings: Any) -> Any:
    """Return the outputs of a model under its strategy, in place of `model.predict`.

    Args:
        model: A model, as for `tfpar.fit`, compiled or not; it may share layers with a trained model.
        *data: As for `tfpar.Trainer.predict`.
        **settings: As for `tfpar.Trainer.predict`.

    Returns:
        The outputs `[examples, ...]` as NumPy arrays, in the order of the inputs.

    Raises:
        TypeError: As for `tfpar.fit`.
        ValueError: As for `tfpar.Trainer.predict`.

    Example:
        >>> features = keras.Model(model.inputs, model.get_layer("features").output)
        >>> tfpar.predict(features, images)
    """
    return _trainer_of(model, "predict", settings).predict(*data, **settings)


def _trainer_of(model: keras.Model, method: str, settings: Mapping[str, Any]) -> Trainer:
    """Return the trainer of a model, which all calls share with its compiled functions."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"tfpar.{method} takes a keras.Model, received {type(model).__name__}.")
    if "strategy" in settings:
        raise TypeError(
            f"tfpar.{method}() uses the strategy in whose scope the model was built, and has no argument 'strategy'. "
            f"Use tfpar.Trainer(model, strategy).{method}(...)."
        )
    keyword_arguments.check(getattr(Trainer, method), f"tfpar.{method}", settings)
    trainer: Trainer = model_methods.get_or_make_trainer(model, Trainer)
    return trainer
