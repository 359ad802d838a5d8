"""Layers of equal settings are found, also where the settings are in no configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tfpar.pipeline.partition.layer_settings import operation_settings

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


# Keras cannot serialize it.
WITHOUT_CONFIGURATION = functools.partial(keras.ops.leaky_relu, negative_slope=0.1)


class Repeated(layers.Dense):
    """A layer whose configuration is that of Dense."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__(width)
        self.times = times


class Block(layers.Layer):
    """A layer with other layers, arrays and functions, and without a configuration."""

    def __init__(self, inner: layers.Layer, table: np.ndarray, activation: Any = keras.ops.relu) -> None:
        super().__init__()
        self.inner, self.table, self.activation, self.itself = [inner], table, activation, {"block": self}

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        self.inner[0].build(shape)


def scaled(factor: float) -> Callable[[Any], Any]:
    def scale(inputs: Any) -> Any:
        return factor * inputs

    return scale


def block(times: int = 1, last: float = 1.0, activation: Any = keras.ops.relu) -> layers.Layer:
    made = Block(Repeated(4, times), np.array([0.0, last]), activation)
    made.build((None, 4))
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dense(4, "relu", kernel_initializer="zeros"),
        lambda: layers.Lambda(keras.ops.relu),
        lambda: layers.Dense(4, WITHOUT_CONFIGURATION),
        lambda: Repeated(4, 2),
        block,
        lambda: layers.TimeDistributed(Repeated(4, 2)),
        lambda: keras.ops.sum(keras.Input((3, 4)), axis=1)._keras_history.operation,
    ],
    ids=["Dense", "Lambda", "activation", "subclass", "block", "wrapper", "function"],
)
def test_equal_settings_are_equal_whatever_the_name(make: Callable[[], Any]) -> None:
    assert operation_settings(make()) == operation_settings(make())
    assert hash(operation_settings(make())) == hash(operation_settings(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: Repeated(4, 2), lambda: Repeated(4, 3)),
        (lambda: Repeated(4, 2), lambda: layers.Dense(4)),
        (lambda: layers.TimeDistributed(Repeated(4, 2)), lambda: layers.TimeDistributed(Repeated(4, 3))),
        (block, lambda: block(times=2)),
        (block, lambda: block(last=2.0)),
        (block, lambda: block(activation=keras.ops.gelu)),
        (lambda: Repeated(4, 1), lambda: Repeated(4, True)),
        (lambda: layers.Lambda(scaled(2.0)), lambda: layers.Lambda(scaled(3.0))),
        (lambda: layers.Dense(4, scaled(2.0)), lambda: layers.Dense(4, scaled(3.0))),
    ],
    ids=["argument", "class", "wrapped", "inner", "array", "function", "type", "Lambda", "activation"],
)
def test_other_settings_are_not_equal(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert operation_settings(one()) != operation_settings(other())


def test_a_frozen_layer_of_an_own_class_has_a_cost_of_its_own() -> None:
    first, second = Repeated(4, 2), Repeated(4, 2)
    second.trainable = False
    assert operation_settings(first) != operation_settings(second)
