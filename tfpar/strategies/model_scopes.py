"""The scope of a strategy, in which users build a model without a trainer, as with `tf.distribute`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from tfpar._compat.models import keras_model


def _keep_methods(model: keras.Model) -> None:
    """Keep Keras' own methods."""


# Gives a new model the methods of a trainer. `tfpar.drop_in`, which is above this module, sets it.
give_methods: Callable[[keras.Model], None] = _keep_methods


class _Engine(Protocol):
    def creation_scope(self) -> contextlib.AbstractContextManager[Any]: ...


class _Strategy(Protocol):
    @property
    def engine(self) -> _Engine: ...


@contextlib.contextmanager
def scope(strategy: _Strategy) -> Iterator[None]:
    """Create models for a strategy inside this context, and record the strategy on them."""

    def note(model: keras.Model) -> None:
        note_strategy(model, strategy)
        give_methods(model)

    with strategy.engine.creation_scope(), keras_model.new_models(note):
        yield


def noted_strategy(model: keras.Model) -> Any:
    """Return the strategy of a model's scope or of its latest trainer; None if it was built in no scope."""
    return getattr(model, "_tfpar_scope", None)


def note_strategy(model: keras.Model, strategy: Any) -> None:
    """Record the strategy of the scope or the trainer of a model."""
    model._tfpar_scope = strategy
