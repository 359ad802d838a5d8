"""Parity, the heart: every strategy gives the losses, metrics and weights of Keras' own `fit` on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests import objective_cases, parity_cases
from tests.parity_cases import Case
from tfpar.parity import TOLERANCES, relative_difference

pytestmark = pytest.mark.usefixtures("logical_cpus")

STRATEGIES = {
    "single device": lambda: tfpar.SingleDevice(),
    "mirrored over 2": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
    "mirrored over 3, packed": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"], pack_bytes=256),
}
CASES = parity_cases.CASES | objective_cases.CASES
IN_FLOAT32_TOO = ("single device", "mirrored over 2")
TABLE = [
    (dtype, strategy, case)
    for case in CASES
    for dtype in TOLERANCES
    for strategy in STRATEGIES
    if dtype == "float64" or strategy in IN_FLOAT32_TOO
]


@contextlib.contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


Result = tuple[dict[str, list[float]], list[np.ndarray]]  # the history, and the weights of model and optimizer


def train(case: Case, fit: Any, model: keras.Model, **more: Any) -> Result:
    data = case.data()
    validation = {"validation_data": data} if case.validates else {}
    history = fit(data, epochs=case.epochs, verbose=0, **case.fit, **validation, **more).history
    return history, [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


@functools.cache
def reference(name: str, dtype: str) -> Result:
    """Keras' own `fit`, without any strategy; the same for all strategies."""
    keras.utils.set_random_seed(0)
    model = CASES[name].build()
    return train(CASES[name], model.fit, model)


def differences(found: Result, expected: Result, dtype: str) -> Iterator[str]:
    """Say what of a result is not as expected."""
    (logs, weights), (expected_logs, expected_weights) = found, expected
    if logs.keys() != expected_logs.keys():
        yield f"the logs hold {list(logs)} instead of {list(expected_logs)}"
        return
    for name, values in expected_logs.items():
        if not relative_difference(np.array(logs[name]), np.array(values)) <= TOLERANCES[dtype]:
            yield f"{name}: {logs[name]} instead of {values}"
    for index, (actual, wanted) in enumerate(zip(weights, expected_weights, strict=True)):
        difference = relative_difference(actual, wanted)
        if not difference <= TOLERANCES[dtype]:
            yield f"weight {index} of shape {actual.shape} differs by {difference:.2g}"


@pytest.mark.parametrize(("dtype", "strategy", "name"), TABLE, ids=lambda value: str(value).replace(" ", "_"))
def test_equals_one_device_after_20_steps(dtype: str, strategy: str, name: str) -> None:
    case = CASES[name]
    with computing_in(dtype):
        expected = reference(name, dtype)
        trainer = tfpar.Trainer(case.build, STRATEGIES[strategy](), seed=0)
        found = train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)
    assert not list(differences(found, expected, dtype))
