"""Optimizers see the names of weights that they see under Keras' own `fit`, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

CPUS = ["CPU:0", "CPU:1"]
SHARDS: dict[str, Callable[[], tfpar.Strategy]] = {
    "tensor parallel": lambda: tfpar.TensorParallel(2),
    "replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
    "sharded replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2, shard="optimizer"),
    "stages of shards": lambda: tfpar.Pipeline(2, 2, num_shards=2, balance=[2, 1]),
}
WHOLE: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice("CPU:1"),
    "mirrored": lambda: tfpar.Mirrored(CPUS),
    "optimizer sharded": lambda: tfpar.Mirrored(CPUS, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(CPUS, shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance=[2, 1]),
    "replicas of pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance=[2, 1]), 2),
}


class ByName(keras.optimizers.SGD):
    """A tenth of the learning rate for the backbone, with the methods of a `tf.Variable`."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.seen: set[str] = set()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.seen.add(variable.name)
        rate = tf.cast(learning_rate, variable.dtype) * (0.1 if "backbone" in variable.name else 1.0)
        rows = tf.IndexedSlices(gradient * rate, tf.range(gradient.shape[0]))
        variable.scatter_sub(rows)


def model_with(optimizer: keras.Optimizer, *inputs: Any) -> keras.Model:
    layers = [
        keras.layers.Dense(8, "tanh", name="backbone"),
        keras.layers.LayerNormalization(name="layer_norm"),
        keras.layers.Dense(3, name="head"),
    ]
    model = keras.Sequential([*inputs, *layers], name="net")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def without_decay_by_name() -> keras.Model:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["layer_norm", "net/backbone/bias:0"])
    return model_with(optimizer, keras.Input((parity_cases.NUM_FEATURES,)))


def by_name() -> keras.Model:
    return model_with(ByName(0.1), keras.Input((parity_cases.NUM_FEATURES,)))


def unbuilt() -> keras.Model:
    return model_with(ByName(0.1))


def unbuilt_subclass() -> keras.Model:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.backbone = keras.layers.Dense(8, "tanh", name="backbone")
            self.head = keras.Sequential([keras.layers.Dense(3, name="last")], name="head")

        def call(self, features: Any) -> Any:
            return self.head(self.backbone(features))

    model = Net()
    model.compile(ByName(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitted(
    build: Callable[[], keras.Model], strategy: tfpar.Strategy | None, built_before: bool = False
) -> keras.Model:
    keras.utils.set_random_seed(0)
    if strategy is None:
        model = build()
        model.fit(small.data(), verbose=0)
        return model
    trainer = tfpar.Trainer(build() if built_before else build, strategy, seed=0)
    trainer.fit(small.data(), verbose=0)
    return trainer.model


def assert_equal(found: keras.Model, expected: keras.Model) -> None:
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize("strategy", [*WHOLE, *SHARDS])
def test_weights_are_excluded_from_weight_decay_by_the_name_of_their_layer(strategy: str, built_before: bool) -> None:
    found = fitted(without_decay_by_name, {**WHOLE, **SHARDS}[strategy](), built_before)
    assert_equal(found, fitted(without_decay_by_name, None))


@pytest.mark.few(3)
@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize("strategy", WHOLE)
def test_an_own_update_step_takes_the_variables_that_keras_passes(strategy: str, built_before: bool) -> None:
    found, expected = fitted(by_name, WHOLE[strategy](), built_before), fitted(by_name, None)
    assert found.optimizer.seen == expected.optimizer.seen
    assert_equal(found, expected)


@pytest.mark.parametrize("build", [unbuilt, unbuilt_subclass])
@pytest.mark.parametrize("strategy", ["single device", "mirrored", "weights sharded"])
def test_weights_that_the_first_batch_creates_have_the_names_of_keras(
    build: Callable[[], keras.Model], strategy: str
) -> None:
    found, expected = fitted(build, WHOLE[strategy]()), fitted(build, None)
    assert found.optimizer.seen == expected.optimizer.seen
