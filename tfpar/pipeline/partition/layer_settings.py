"""Settings of layer calls, to measure equal calls once and to compile stages of equal calls once.

`get_config` does not contain all settings: a custom subclass may not override it, and functions appear by name only. So
custom layers are compared by their attributes, and functions by their identity.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.models.keras_model import all_layers, is_of_keras
from tfpar.pipeline.graph.ir import Call, Value


def operation_settings(operation: keras.Operation, with_trainable: bool = True) -> Hashable:
    """Return a key that is equal for operations with the same settings, regardless of names and weights.

    Args:
        operation: A layer, or another operation of a model. It must exist as long as the key.
        with_trainable: Whether `trainable` is one of the settings.

    Example:
        >>> operation_settings(keras.layers.Dense(4)) == operation_settings(keras.layers.Dense(4))
        True
    """
    return _Settings(with_trainable).of_operation(operation, frozenset())


def call_settings(calls: Sequence[Call], inputs: Sequence[Value]) -> Hashable:
    """Return a key that is equal for layer calls that compute the same, regardless of names and weights.

    Equal calls also have the same connections, and share layers and weights in the same way.

    Args:
        calls: Layer calls in order. They must exist as long as the key.
        inputs: The values that they read from earlier calls.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> layers = [keras.layers.Dense(width) for width in (4, 4, 8)]
        >>> calls = trace(keras.Sequential([keras.Input((4,)), *layers])).calls
        >>> first, same, other = (call_settings([call], call.inputs) for call in calls)
        >>> first == same, first == other
        (True, False)
    """
    number_of: dict[Any, int] = {}

    def numbered(item: Any) -> int:
        return number_of.setdefault(item if isinstance(item, Value) else id(item), len(number_of))

    def of_leaf(leaf: Any) -> Hashable:
        return ("value", numbered(leaf)) if isinstance(leaf, Value) else settings.of_value(leaf, frozenset())

    def of_call(call: Call) -> Hashable:
        arguments = call.args, dict(call.kwargs)
        return (
            settings.of_operation(call.operation, frozenset()), numbered(call.operation),
            tuple(map(numbered, call.variables)), repr(keras.tree.map_structure(lambda leaf: None, arguments)),
            tuple(map(of_leaf, keras.tree.flatten(arguments))), call.training, call.autocast_dtype,
            tuple(map(numbered, call.outputs)),
        )  # fmt: skip

    settings = _Settings(with_trainable=True)
    return tuple(map(numbered, inputs)), tuple(map(of_call, calls))


def model_settings(model: keras.Model) -> Hashable:
    """Return a key that changes with the attributes of a custom model, except those set by `compile`."""
    if is_of_keras(type(model)):
        return None
    return _Settings(with_trainable=False).of_attributes(model, _names_of_models(), frozenset())


def _has_own_function(layer: keras.Layer) -> bool:
    """Return whether a Keras layer has a custom function, which `get_config` cannot represent."""
    own = [value for name, value in vars(layer).items() if name not in _names_of_layers()]
    return any(callable(value) and not is_of_keras(value) for value in own)


@functools.cache
def _names_of_layers() -> frozenset[str]:
    return frozenset(vars(keras.Layer())) - {"activity_regularizer"}


@functools.cache
def _names_of_operations() -> frozenset[str]:
    return frozenset(vars(keras.Operation()))


@functools.cache
def _names_of_models() -> frozenset[str]:
    """Return the names of the attributes that every compiled model has after `fit` and `evaluate`."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    set_later = {"history", "stop_training", "stop_evaluating", "stop_predicting"}
    return (frozenset(vars(model)) | set_later) - {"activity_regularizer"}


def _without_trainable(settings: Any) -> Any:
    """Remove `trainable` from the configuration of a layer and of its inner layers."""
    if isinstance(settings, Mapping):
        return {key: _without_trainable(value) for key, value in settings.items() if key != "trainable"}
    return list(map(_without_trainable, settings)) if isinstance(settings, list | tuple) else settings


class _Settings:
    """Collects the settings of operations and of the values of their attributes."""

    def __init__(self, with_trainable: bool) -> None:
        self._with_trainable = with_trainable

    def of_operation(self, operation: keras.Operation, above: frozenset[int]) -> Hashable:
        """Return the settings of an operation; `above` are the ids of the objects that contain it."""
        kind = type(operation)
        if not isinstance(operation, keras.Layer):
            return kind, self.of_attributes(operation, _names_of_operations(), above)
        if all(is_of_keras(type(layer)) and not _has_own_function(layer) for layer in all_layers(operation)):
            settings = operation.get_config()
            settings.pop("name", None)
            return kind, repr(settings if self._with_trainable else _without_trainable(settings))
        policy = operation.dtype_policy.name, self._with_trainable and operation.trainable
        others = _names_of_models() if isinstance(operation, keras.Model) else _names_of_layers()
        return kind, policy, self.of_attributes(operation, others, above)

    def of_attributes(self, operation: keras.Operation, others: frozenset[str], above: frozenset[int]) -> Hashable:
        """Return the settings in the attributes of an operation, except those named in `others`."""
        own = {name: value for name, value in vars(operation).items() if name not in others}
        own = {name: value for name, value in own.items() if not name.startswith(("_self_", "_tfpar_"))}
        return self.of_value(own, above | {id(operation)})

    def of_value(self, value: Any, above: frozenset[int]) -> Hashable:
        """Return the settings in the value of an attribute; for unknown types its identity."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value), value
        if id(value) in above:
            return "above"
        above = above | {id(value)}
        if isinstance(value, Mapping):
            return tuple((repr(key), self.of_value(item, above)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return tuple(self.of_value(item, above) for item in value)
        if isinstance(value, set | frozenset):
            return frozenset(self.of_value(item, above) for item in value)
        if isinstance(value, keras.Variable):
            return tuple(value.shape), value.dtype, self._with_trainable and value.trainable
        if tf.is_tensor(value) and tf.is_symbolic_tensor(value):  # a tensor that `call` assigned
            return value.shape.rank, value.dtype
        if isinstance(value, np.ndarray | tf.Tensor):
            array = np.asarray(value)
            return array.shape, array.dtype.str, hashlib.sha256(array.tobytes()).digest()
        if isinstance(value, keras.Operation):
            return self.of_operation(value, above)
        if is_of_keras(type(value)) and hasattr(value, "get_config"):
            with contextlib.suppress(NotImplementedError):  # some Keras classes have no configuration
                return type(value), repr(value.get_config())
        return id(value)
