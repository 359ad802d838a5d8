"""Layers whose call returns nothing, or a constant beside its tensors: models with them are cut and divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

import tfpar
from tests.support import small
from tfpar.pipeline.graph.tracing import trace

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "stages": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    "layers": lambda: tfpar.TensorParallel(2),
    "weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


class Looks(keras.layers.Layer):
    """Returns nothing."""

    def call(self, features: Any) -> None:
        keras.ops.sum(features)


class Block(keras.Model):
    """Returns its output and, in place of its scores, None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = keras.layers.Dense(16, "relu"), keras.layers.Dense(8)

    def call(self, features: Any) -> Any:
        return features + self.down(self.up(features)), None


class Scaled(keras.layers.Layer):
    """Returns its output in a dictionary with a number and None."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(8)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, features: Any) -> Any:
        return {"none": None, "values": self.dense(features), "scale": 2.0}


class Model(keras.Model):
    """Calls a layer between two others."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.between, self.last = keras.layers.Dense(8), between, keras.layers.Dense(3)

    def call(self, features: Any) -> Any:
        hidden = self.first(features)
        found = self.between(hidden)
        if isinstance(found, tuple):
            hidden, _ = found
        elif found is not None:
            hidden = found["values"] * found["scale"]
        return self.last(hidden)


def build(layer: type) -> keras.Model:
    model = Model(layer())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layer", [Looks, Block, Scaled], ids=lambda layer: layer.__name__)
def test_a_model_trains_as_on_one_device(layer: type, strategy: str) -> None:
    small.assert_trains_as_one_device(lambda: build(layer), small.data, STRATEGIES[strategy])


def test_a_model_that_returns_none_beside_tensors_is_cut_into_its_own_layers() -> None:
    model, features = build(Block), keras.ops.zeros((2, 5))
    model(features)
    classes = [type(call.operation).__name__ for call in trace(model, features).calls]
    assert classes == ["Dense", "Dense", "Dense", "Add", "Dense"]
