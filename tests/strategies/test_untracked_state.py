"""State that layers and losses keep in variables that Keras does not track: refused where it would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

CPUS = ["CPU:0", "CPU:1"]
IN_PARTS: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(CPUS),
    "weights sharded": lambda: tfpar.Mirrored(CPUS, shard="weights"),
    "stages": lambda: tfpar.Pipeline(2, 1, balance="parameters"),
    "micro-batches": lambda: tfpar.Pipeline(1, 2),
}
WHOLE: dict[str, Callable[[], tfpar.Strategy]] = {
    "single_device": small.STRATEGIES["single_device"],
    "tensor parallel": lambda: tfpar.TensorParallel(2),
}
STEPS = 10


class Box:
    """An object that Keras does not look into."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable


class Counter(keras.layers.Layer):
    """Counts its calls.

    Args:
        kind: Where the count is: in a "tf.Variable", a "box", a "tf.function" that changes it, or a "weight".
    """

    def __init__(self, kind: str) -> None:
        super().__init__(name="counter")
        self._kind = kind
        if kind == "weight":
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        elif kind == "box":
            self._box = Box(keras.Variable(0.0, trainable=False, name="count"))
        else:
            self.count = tf.Variable(0.0, trainable=False, name="count")
            self._add = tf.function(lambda: self.count.assign_add(1.0))

    def value(self) -> float:
        return float((self._box.variable if self._kind == "box" else self.count).numpy())

    def call(self, features: Any) -> Any:
        if self._kind == "tf.function":
            self._add()
        elif self._kind == "tf.Variable":
            self.count.assign_add(1.0)
        else:
            count = self._box.variable if self._kind == "box" else self.count
            count.assign(count + 1.0)
        return features


class CountingLoss(keras.losses.Loss):
    """A squared error that counts its calls."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.count = keras.Variable(0.0, trainable=False, name="count")

    def call(self, targets: Any, outputs: Any) -> Any:
        self.count.assign(self.count + 1.0)
        return keras.ops.mean(keras.ops.square(keras.ops.cast(targets, outputs.dtype)[..., None] - outputs), axis=-1)


def counting(kind: str, found: list[Counter] | None = None) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        counter = Counter(kind)
        if found is not None:
            found.append(counter)
        features = keras.Input((parity_cases.NUM_FEATURES,))
        hidden = counter(keras.layers.Dense(4, "tanh")(features))
        model = keras.Model(features, keras.layers.Dense(parity_cases.NUM_CLASSES)(hidden))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def of_loss() -> keras.Model:
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile("sgd", CountingLoss())
    return model


def of_generator() -> keras.Model:
    """Noise from a generator in the closure of a Lambda."""
    generator = keras.random.SeedGenerator(1)

    def add_noise(features: Any) -> Any:
        return features + keras.random.normal(keras.ops.shape(features), seed=generator)

    features = keras.Input((parity_cases.NUM_FEATURES,))
    hidden = keras.layers.Lambda(add_noise, name="noise")(keras.layers.Dense(4)(features))
    model = keras.Model(features, keras.layers.Dense(parity_cases.NUM_CLASSES)(hidden))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("kind", ["tf.Variable", "box", "tf.function"])
@pytest.mark.parametrize("strategy", IN_PARTS)
def test_a_layer_with_untracked_state_is_refused_in_parts(strategy: str, kind: str) -> None:
    trainer = tfpar.Trainer(counting(kind), IN_PARTS[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"keep its state in weights that Keras tracks.*add_weight\(trainable=False\)"):
        trainer.fit(small.data(), verbose=0)


def test_the_layer_and_the_variable_are_named() -> None:
    trainer = tfpar.Trainer(counting("box"), IN_PARTS["mirrored"](), seed=0)
    with pytest.raises(ValueError, match="received 'counter', which changes the variable 'count' in its call"):
        trainer.fit(small.data(), verbose=0)


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_a_loss_with_untracked_state_is_refused_in_parts(strategy: str) -> None:
    trainer = tfpar.Trainer(of_loss, IN_PARTS[strategy](), seed=0)
    with pytest.raises(ValueError, match="received 'counting', which changes the variable 'count'"):
        trainer.fit(small.data(), verbose=0)


@pytest.mark.parametrize("strategy", ["stages", "weights sharded"])
def test_an_untracked_generator_is_refused_in_stages(strategy: str) -> None:
    trainer = tfpar.Trainer(of_generator, IN_PARTS[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"received 'noise', .* Keep the generator in an attribute of a layer"):
        trainer.fit(small.data(), verbose=0)


def test_replicas_train_with_an_untracked_generator() -> None:
    history = tfpar.Trainer(of_generator, IN_PARTS["mirrored"](), seed=0).fit(small.data(), verbose=0)
    assert len(history.history["loss"]) == 1


@pytest.mark.parametrize("kind", ["tf.Variable", "box", "weight"])
@pytest.mark.parametrize("strategy", WHOLE)
def test_a_strategy_without_parts_counts_each_step(strategy: str, kind: str) -> None:
    found: list[Counter] = []
    tfpar.Trainer(counting(kind, found), WHOLE[strategy](), seed=0).fit(small.data(), verbose=0)
    assert found[0].value() == STEPS


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_a_weight_counts_each_step(strategy: str) -> None:
    found: list[Counter] = []
    tfpar.Trainer(counting("weight", found), IN_PARTS[strategy](), seed=0).fit(small.data(), verbose=0)
    assert found[0].value() == STEPS
