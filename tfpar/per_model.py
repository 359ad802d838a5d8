"""Values of a strategy for each model that it trains, with the lifetime of the model."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import keras

Value = TypeVar("Value")
_ATTRIBUTE = "_tfpar_values"


class PerModel(Generic[Value]):
    """A value for each model, which may refer to the model.

    The model holds its value, so that Python frees both together. A `weakref.WeakKeyDictionary` would hold the value,
    and with it the model, for as long as the strategy lives: one strategy for the many models of a search frees none.

    Example:
        >>> stages: PerModel[list[str]] = PerModel()
        >>> stages[model] = ["first", "second"]
        >>> model in stages
        True
    """

    def __getitem__(self, model: keras.Model) -> Value:
        """Return the value of a model; raises KeyError where there is none."""
        value: Value = _values(model)[self]
        return value

    def __setitem__(self, model: keras.Model, value: Value) -> None:
        """Set the value of a model."""
        _values(model)[self] = value

    def __contains__(self, model: keras.Model) -> bool:
        """Return whether a model has a value."""
        return self in _values(model)

    def get(self, model: keras.Model) -> Value | None:
        """Return the value of a model, None where there is none."""
        value: Value | None = _values(model).get(self)
        return value

    def setdefault(self, model: keras.Model, default: Value) -> Value:
        """Return the value of a model; set it to the default first if there is none."""
        value: Value = _values(model).setdefault(self, default)
        return value

    def pop(self, model: keras.Model) -> None:
        """Remove the value of a model, if it has one."""
        _values(model).pop(self, None)


def _values(model: keras.Model) -> weakref.WeakKeyDictionary[PerModel[Any], Any]:
    """Return the values of all strategies for a model."""
    # Not by assignment, which Keras tracks: nothing here is a part of the model.
    values: weakref.WeakKeyDictionary[PerModel[Any], Any] = vars(model).setdefault(
        _ATTRIBUTE, weakref.WeakKeyDictionary()
    )
    return values
