"""Models with a `train_step`, `test_step` or `predict_step` of their own, on one device and on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import small
from tests.support.once import in_a_run
from tests.support.own_step_cases import CASES, Case
from tfpar._compat.random_numbers import fixed_random_ops

pytestmark = pytest.mark.usefixtures("logical_cpus")
TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": tfpar.SingleDevice,
    "replicas": lambda: tfpar.Mirrored(TWO),
    "sharded optimizer": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
}


@pytest.fixture(autouse=True)
def typical_numbers() -> Iterator[None]:
    """Compute in float64, and replace random numbers: those of replicas are not those of one device."""
    keras.config.set_floatx("float64")
    with fixed_random_ops.all_fixed(lambda name: None):
        yield
    keras.config.set_floatx("float32")


def trained(case: Case, fit: Callable[..., Any], model: keras.Model) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    validation = {"validation_data": case.data()} if case.validates else {}
    history = fit(case.data(), epochs=2, verbose=0, **validation).history
    return history, model.get_weights()


@in_a_run
def of_keras(name: str) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Return what Keras' own fit gives."""
    keras.utils.set_random_seed(0)
    model = CASES[name].build()
    return trained(CASES[name], model.fit, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_own_steps_equal_those_of_keras(name: str, strategy: str) -> None:
    trainer = tfpar.Trainer(CASES[name].build, STRATEGIES[strategy](), seed=0)
    history, weights = trained(CASES[name], trainer.fit, trainer.model)
    expected_history, expected = of_keras(name)
    small.assert_same_history(history, expected_history)
    for actual, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-10)
