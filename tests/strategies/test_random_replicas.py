"""Random numbers drawn without a seed in a layer's call: different on every replica, and repeatable."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar
from tests.support import small

pytestmark = pytest.mark.usefixtures("logical_cpus")


class Noise(layers.Layer):
    """Adds numbers of Keras' global generator."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs))


def build() -> keras.Model:
    features = keras.Input((5,))
    model = keras.Model(features, layers.Dense(1)(Noise()(features)))
    model.compile("sgd", "mse")
    return model


def test_draws_without_a_seed_are_repeatable() -> None:
    keras.random.normal((2,))  # the global generator is there before, outside of any scope
    inputs = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
    weights = []
    for _ in range(2):
        trainer = tfpar.Trainer(build, small.STRATEGIES["mirrored"](), seed=0)
        losses = trainer.fit(inputs, inputs[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
        weights.append(trainer.model.get_weights())
    assert len(set(losses)) == 2
    small.assert_same_state(*weights)


def test_every_replica_and_every_call_draws_other_numbers() -> None:
    features = keras.Input((5,))
    trainer = tfpar.Trainer(
        lambda: _compiled(keras.Model(features, Noise()(features))), tfpar.Mirrored(["CPU:0", "CPU:1"])
    )
    drawn = trainer.predict(np.zeros((8, 5), "float32"), batch_size=4, verbose=0)
    assert len(np.unique(drawn)) == drawn.size


def test_the_generator_continues_from_its_state() -> None:
    keras.utils.set_random_seed(3)
    keras.random.normal((2,))
    expected = np.asarray(keras.random.normal((2,)))
    keras.utils.set_random_seed(3)
    keras.random.normal((2,))
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES["mirrored"](), seed=None)
    trainer.fit(small.data(), verbose=0)
    np.testing.assert_array_equal(np.asarray(keras.random.normal((2,))), expected)


def _compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model
