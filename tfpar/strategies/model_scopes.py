"""The scope of a strategy, in which users build a model without a trainer, as in a scope of `tf.distribute`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from tfpar._compat.models import keras_model


def _leave_methods(model: keras.Model) -> None:
    """Leave Keras' own methods."""


# Gives a new model the methods of a trainer. `tfpar.drop_in` sets it, which is layers above this one.
give_methods: Callable[[keras.Model], None] = _leave_methods


class _Engine(Protocol):
    def creation_scope(self) -> contextlib.AbstractContextManager[Any]: ...


class _Strategy(Protocol):
    @property
    def engine(self) -> _Engine: ...


@contextlib.contextmanager
def scope(strategy: _Strategy) -> Iterator[None]:
    """Place the variables of new models for a strategy inside this context, and note the strategy on the models.

    Args:
        strategy: The strategy.
    """

    def note(model: keras.Model) -> None:
        note_strategy(model, strategy)
        give_methods(model)

    with strategy.engine.creation_scope(), keras_model.new_models(note):
        yield


def noted_strategy(model: keras.Model) -> Any:
    """Return the strategy in whose scope a model was built, or that of its newest trainer since; None without scope."""
    return getattr(model, "_tfpar_scope", None)


def note_strategy(model: keras.Model, strategy: Any) -> None:
    """Note the strategy under which a model trains.

    Args:
        model: A model that is built in a scope.
        strategy: The strategy of the scope, or of a trainer.
    """
    model._tfpar_scope = strategy
