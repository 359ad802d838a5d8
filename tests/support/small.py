"""Strategies under test, and a tiny model with its data, for the tests of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single_device": lambda: tfpar.SingleDevice(),
    "mirrored": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
}
# Those that split a batch: over replicas, or into micro-batches.
SPLITTING_STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": STRATEGIES["mirrored"],
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"], balance="parameters"),
}
each_splitting_strategy = pytest.mark.parametrize("strategy", SPLITTING_STRATEGIES)
STEPS_PER_EPOCH = 10

build_model = parity_cases.classifier()


def data() -> tf.data.Dataset:
    """Ten batches, the last of 1 example."""
    return parity_cases.batches(73, 8)


def shuffled() -> tf.data.Dataset:
    """Ten batches, in another order every epoch."""
    arrays = (parity_cases.inputs(73), parity_cases.labels(73))
    return tf.data.Dataset.from_tensor_slices(arrays).shuffle(73, seed=3, reshuffle_each_iteration=True).batch(8)


def initial_model() -> keras.Model:
    """The tiny model and its optimizer, built from seed 0."""
    keras.utils.set_random_seed(0)
    model = build_model()
    model.optimizer.build(model.trainable_variables)
    return model


class Again:
    """A model with a method that resets its state, so that one compilation serves many tests.

    Args:
        model: A built and compiled model.
    """

    def __init__(self, model: keras.Model) -> None:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        self._variables = [*model.variables, *model.optimizer.variables]
        self._values = [variable.numpy() for variable in self._variables]

    def reset(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)


def state(model: keras.Model) -> list[np.ndarray]:
    """Weights, random state and the optimizer's variables."""
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_same_state(actual: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 0.0) -> None:
    assert len(actual) == len(expected), f"{len(actual)} variables instead of {len(expected)}"
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        message = f"variable {index} of shape {np.shape(other)} differs"
        if tolerance:
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=message)
        else:
            np.testing.assert_array_equal(one, other, err_msg=message)


def assert_same_history(actual: dict[str, list[Any]], expected: dict[str, list[Any]], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys(), f"the logs hold {list(actual)} instead of {list(expected)}"
    for name, values in expected.items():
        assert len(actual[name]) == len(values), f"{name} has {len(actual[name])} epochs instead of {len(values)}"
        np.testing.assert_allclose(
            np.array(actual[name]), np.array(values), rtol=tolerance, atol=tolerance, err_msg=f"{name} differs"
        )


def assert_trains_as_one_device(
    build: Callable[[], keras.Model],
    dataset: Callable[[], Any],
    strategy: Callable[[], tfpar.Strategy] = STRATEGIES["mirrored"],
    tolerance: float = 1e-5,
    epochs: int = 2,
) -> None:
    """Train and evaluate under a strategy and with Keras itself, and compare logs, weights and optimizer."""
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(dataset(), epochs=epochs, verbose=0).history
    trainer = tfpar.Trainer(build, strategy(), seed=0)
    assert_same_history(trainer.fit(dataset(), epochs=epochs, verbose=0).history, expected, tolerance)
    variables = [
        [*one.get_weights(), *(slot.numpy() for slot in one.optimizer.variables)] for one in (trainer.model, model)
    ]
    assert_same_state(*variables, tolerance)
    evaluated, wanted = (one.evaluate(dataset(), verbose=0, return_dict=True) for one in (trainer, model))
    assert_same_history({k: [v] for k, v in evaluated.items()}, {k: [v] for k, v in wanted.items()}, tolerance)
