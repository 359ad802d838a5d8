"""Values that are kept for each model, for the lifetime of the model."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import keras

Value = TypeVar("Value")
_ATTRIBUTE = "_tfpar_values"


class PerModel(Generic[Value]):
    """A mapping from models to values, which may refer to the model.

    The model holds the value, so that both are freed together. A `weakref.WeakKeyDictionary` would keep the value, and
    with it the model, alive as long as the mapping: a strategy that trains many models would free none.

    Example:
        >>> stages: PerModel[list[str]] = PerModel()
        >>> stages[model] = ["first", "second"]
        >>> model in stages
        True
    """

    def __getitem__(self, model: keras.Model) -> Value:
        value: Value = _values(model)[self]
        return value

    def __setitem__(self, model: keras.Model, value: Value) -> None:
        _values(model)[self] = value

    def __contains__(self, model: keras.Model) -> bool:
        return self in _values(model)

    def get(self, model: keras.Model) -> Value | None:
        """Return the value of a model; None if it has none."""
        value: Value | None = _values(model).get(self)
        return value

    def setdefault(self, model: keras.Model, default: Value) -> Value:
        """Return the value of a model, after setting it to the default if it has none."""
        value: Value = _values(model).setdefault(self, default)
        return value

    def pop(self, model: keras.Model) -> None:
        """Remove the value of a model, if it has one."""
        _values(model).pop(self, None)


def _values(model: keras.Model) -> weakref.WeakKeyDictionary[PerModel[Any], Any]:
    # Not set as an attribute, which Keras would track as part of the model.
    values: weakref.WeakKeyDictionary[PerModel[Any], Any] = vars(model).setdefault(
        _ATTRIBUTE, weakref.WeakKeyDictionary()
    )
    return values
