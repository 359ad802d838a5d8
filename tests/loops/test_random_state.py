"""Training advances the global random states as Keras' own `fit` does, so that later draws of a script are equal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.parity_cases import batches, classifier
from tests.support.small import STRATEGIES
from tfpar._compat.random_numbers import fixed_random_ops

pytestmark = pytest.mark.usefixtures("logical_cpus")

WITH_PIPELINES: dict[str, Callable[[], tfpar.Strategy]] = {
    **STRATEGIES,
    "pipeline": lambda: tfpar.Pipeline(2, 2),
    "one micro-batch": lambda: tfpar.Pipeline(2, 1, balance="parameters", recompute=True),
}


class Noise(layers.Layer):
    """Draws from Keras' global generator in training."""

    def call(self, features: Any, training: bool = False) -> Any:
        return features + keras.random.normal(ops.shape(features)) if training else features


def noisy_loss(targets: Any, outputs: Any) -> Any:
    noise = keras.random.normal(ops.shape(outputs), dtype=outputs.dtype)
    return keras.losses.sparse_categorical_crossentropy(targets, outputs + noise, from_logits=True)


MODELS = {
    "dropout": classifier(layers=lambda: [layers.Dropout(0.5)]),
    "TensorFlow's own": classifier(
        layers=lambda: [layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), 0, 1, x.dtype))]
    ),
    "no layer's generator": classifier(layers=lambda: [Noise()]),
    "no layer's generator, in the loss": classifier(loss=lambda: noisy_loss, layers=lambda: [Noise()]),
}


def drawn_afterwards() -> list[Any]:
    """What a script would draw next: weights of a new layer, and numbers of each global generator."""
    dense = layers.Dense(2)
    dense.build((None, 3))
    numbers = [random.random(), np.random.random(), float(tf.random.uniform([])), float(keras.random.normal([]))]
    return [*numbers, *np.ravel(dense.kernel)]


# Keras' global generator is made within the step, which replicas cannot share.
NOT_SHARED = [("mirrored", name) for name in MODELS if "no layer's" in name]
ROWS = [row for row in itertools.product(WITH_PIPELINES, MODELS) if row not in NOT_SHARED]


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "name"), ROWS, ids=lambda name: name.replace(" ", "_"))
def test_draws_after_fit_equal_those_of_keras(strategy: str, name: str) -> None:
    keras.utils.set_random_seed(3)
    model = MODELS[name]()
    model.fit(batches(10, 4), verbose=0)
    expected = drawn_afterwards()
    trainer = tfpar.Trainer(MODELS[name], WITH_PIPELINES[strategy](), seed=3)
    trainer.fit(batches(10, 4), verbose=0)
    assert drawn_afterwards() == expected


@pytest.mark.extended
def test_a_check_of_parity_moves_nothing() -> None:
    keras.utils.set_random_seed(5)
    expected = drawn_afterwards()
    keras.utils.set_random_seed(5)
    tfpar.check_parity(MODELS["dropout"], batches(8, 4), tfpar.Pipeline(2, 2), num_steps=1, verbose=0)
    assert drawn_afterwards() == expected
    assert keras.config.floatx() == "float32"


def test_a_loss_may_draw_at_random() -> None:
    build = MODELS["no layer's generator, in the loss"]
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        expected = build().fit(batches(10, 4), epochs=2, verbose=0).history
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 1, balance="parameters"), seed=0)
        found = trainer.fit(batches(10, 4), epochs=2, verbose=0).history
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)


def test_data_that_another_thread_augments_during_a_trial_are_random() -> None:
    with fixed_random_ops.fixed() as drawn, ThreadPoolExecutor(1) as thread:
        assert len(set(keras.random.uniform((4,)).numpy())) == 1
        assert len(set(thread.submit(lambda: tf.random.uniform((4,))).result().numpy())) == 4
    assert drawn == {"uniform"}
