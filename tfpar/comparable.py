"""What makes two trainings comparable: equal float types, and nothing that differs by design when batches are split."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.random_numbers import fixed_random_ops
from tfpar.messages.reasons import reason_of
from tfpar.messages.received import listed
from tfpar.strategies import Strategy

TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
# Raised by Keras and TensorFlow if operands have different types, or an operation lacks float64.
_TYPE_ERRORS = (TypeError, ValueError, tf.errors.OpError)
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The float type of two trainings.

    Args:
        dtype: "float64" or "float32".
        reason: Why float64 is not possible; empty for float64, and if float32 was requested.
    """

    dtype: str
    reason: str = ""

    def describe(self) -> str:
        """Return the type and the reason for it.

        Example:
            >>> Precision("float32", "'head' computes in float32").describe()
            "float32, as the model does not compute in float64 ('head' computes in float32)"
        """
        return f"{self.dtype}, as the model does not compute in float64 ({self.reason})" if self.reason else self.dtype


FLOAT64 = Precision("float64")


def trained(
    train: Callable[[str], tuple[keras.Model, Result]], dtype: str = "float64"
) -> tuple[keras.Model, Result, Precision]:
    """Train in float64, or in float32 if the model does not compute in float64.

    Args:
        train: Trains a new model in a float type, and returns the model and other results.
        dtype: "float32" to train in float32 in any case.

    Returns:
        The results of `train`, and the float type.
    """
    if dtype == "float32":
        return *train(dtype), Precision(dtype)
    try:
        model, results = train("float64")
    except _TYPE_ERRORS as error:
        reason = reason_of(error)
    else:
        reason = _narrow_layer(model)
        if not reason:
            return model, results, FLOAT64
    return *train("float32"), Precision("float32", reason)


def _narrow_layer(model: keras.Model) -> str:
    narrow = ("float32", "float16", "bfloat16")
    dtypes = {layer.name: layer.compute_dtype for layer in keras_model.all_layers(model)}
    return next((f"{name!r} computes in {dtype}" for name, dtype in dtypes.items() if dtype in narrow), "")


@contextlib.contextmanager
def without_differences_by_design(strategy: Strategy) -> Iterator[list[str]]:
    """Switch off random ops and batch statistics in this context if a strategy splits batches.

    Random ops return constants with which Dropout keeps every unit. BatchNormalization normalizes as in inference,
    unless it is synchronized over replicas and so equals one device.

    Returns:
        The names of the layers that were switched off, in a list that grows as the model runs.
    """
    names: list[str] = []

    def note(name: str) -> None:
        if name not in names:
            names.append(name)

    if strategy.engine.batch_parts[0] == 1:
        yield names
        return
    with fixed_random_ops.all_fixed(note), _no_batch_statistics(note, even_synchronized=strategy.engine.cuts_model):
        yield names


@contextlib.contextmanager
def _no_batch_statistics(note: Callable[[str], None], even_synchronized: bool) -> Iterator[None]:
    call = keras.layers.BatchNormalization.call

    def normalize(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training and layer.trainable and (even_synchronized or not layer.synchronized):
            note(layer.name)
            training = False
        return call(layer, inputs, training=training, mask=mask)

    with mock.patch.object(keras.layers.BatchNormalization, "call", normalize):
        yield


def switched_off_clause(names: Sequence[str]) -> str:
    """Return a clause about the layers that were switched off; empty if there are none.

    Example:
        >>> switched_off_clause(["dropout"])
        'with dropout switched off, which differs by design'
    """
    differ = "differ" if len(names) > 1 else "differs"
    return f"with {listed(names)} switched off, which {differ} by design" if names else ""
