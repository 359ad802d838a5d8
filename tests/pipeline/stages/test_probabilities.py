"""Probabilities that cross from stage to stage or to the loss keep the logits from which Keras computes the loss."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LARGE = keras.initializers.RandomNormal(stddev=30.0)  # logits whose probabilities Keras would clip


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def classifier() -> keras.Model:
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(5, "softmax", kernel_initializer=LARGE)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy", "sparse_categorical_crossentropy"])
    return model


def two_outputs() -> keras.Model:
    """The probabilities are also an input of the last stage."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    chance = keras.layers.Dense(1, "sigmoid", kernel_initializer=LARGE, name="chance")(hidden)
    other = keras.layers.Dense(3, "tanh")(keras.layers.Concatenate()([hidden, chance]))
    model = keras.Model(inputs, [chance, keras.layers.Dense(1, name="other")(other)])
    model.compile("sgd", ["binary_crossentropy", "mse"], metrics=[["accuracy"], []])
    return model


def trained(build: Any, targets: Any, strategy: tfpar.Strategy) -> Any:
    inputs = np.random.default_rng(0).normal(size=(16, 4))
    trainer = tfpar.Trainer(build, strategy, seed=0)
    history = trainer.fit(inputs, targets, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    logs = trainer.evaluate(inputs, targets, batch_size=6, verbose=0)
    return history, logs, trainer.predict(inputs, batch_size=6, verbose=0), trainer.model.get_weights()


STRATEGIES = {
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"], balance="parameters"),
    "replicas of shards": lambda: tfpar.Hybrid(
        tfpar.TensorParallel(2), num_replicas=2, devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    ),
    "sharded weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [classifier, two_outputs])
def test_the_loss_of_large_logits_is_that_of_one_device(build: Any, strategy: str) -> None:
    classes = np.random.default_rng(1).integers(0, 5, 16)
    targets = classes if build is classifier else [classes[:, None] % 2, classes[:, None] / 5]
    found, expected = (trained(build, targets, one) for one in (STRATEGIES[strategy](), tfpar.SingleDevice()))
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), found, expected
    )
