"""Parity: every strategy gives the losses, metrics and weights of Keras' own `fit` on one device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import extent, objective_cases, once, parity_cases
from tests.support.parity_cases import Case
from tfpar.comparable import TOLERANCES
from tfpar.parity import relative_difference

pytestmark = pytest.mark.usefixtures("logical_cpus")

STRATEGIES = {
    "single device": lambda: tfpar.SingleDevice(),
    "mirrored over 2": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
    "mirrored over 3, packed": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"], pack_bytes=256),
    "mirrored over 3, uneven shares": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"], batch_shares=[1, 5, 2]),
    "mirrored over 3, sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"], shard="optimizer"),
    "mirrored over 3, weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"], shard="weights"),
    "mirrored over 1": lambda: tfpar.Mirrored(["CPU:0"]),
    "tensor parallel over 3": lambda: tfpar.TensorParallel(3),
    "2 replicas of tensor parallel over 2": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
}
# In CI every other case has its turn under one of these.
IN_TURN = (
    "single device",
    "mirrored over 1",
    "mirrored over 3, packed",
    "mirrored over 3, uneven shares",
    "mirrored over 3, sharded",
    "mirrored over 3, weights sharded",
    "tensor parallel over 3",
    "2 replicas of tensor parallel over 2",
)
CASES = parity_cases.CASES | objective_cases.CASES
OF_WHOLE_BATCH = (*objective_cases.CASES, *parity_cases.ONE_MICROBATCH_ONLY)
NOT_IN_PARTS = ("L1, L2 and activity", "add_loss", "loss object in a layer", "BatchNormalization, synchronized")
REFUSED = {
    *(("tensor parallel over 3", case) for case in objective_cases.CASES),
    *(("mirrored over 3, weights sharded", case) for case in OF_WHOLE_BATCH),
    *(("2 replicas of tensor parallel over 2", case) for case in (*objective_cases.CASES, *NOT_IN_PARTS)),
}
Row = tuple[str, str, str]  # dtype, strategy, case


def table(whole: bool) -> list[Row]:
    """Every case under every strategy and in both types; in CI each on two replicas or under another one, in turn."""
    if whole:
        return [row for row in itertools.product(TOLERANCES, STRATEGIES, CASES) if row[1:] not in REFUSED]
    rows: list[Row] = []
    for number, case in enumerate(CASES):
        taken = [name for name in IN_TURN if (name, case) not in REFUSED]
        strategy = taken[number // 2 % len(taken)] if number % 2 else "mirrored over 2"
        rows.append(("float64" if number % 3 else "float32", strategy, case))
    return rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_equals_one_device_after_20_steps:
        rows = table(extent.is_whole())
        metafunc.parametrize(("dtype", "strategy", "name"), rows, ids=lambda value: str(value).replace(" ", "_"))


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


@once.in_a_run
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


def test_the_rows_have_every_case_every_strategy_and_both_types() -> None:
    rows = table(whole=False)
    assert [case for *_, case in rows] == [*CASES]
    assert {strategy for _, strategy, _ in rows} == {*STRATEGIES}
    assert {dtype for dtype, *_ in rows} == {*TOLERANCES}
    assert {*rows} < {*table(whole=True)}


@pytest.mark.few(10)
def test_equals_one_device_after_20_steps(dtype: str, strategy: str, name: str) -> None:
    case = CASES[name]
    with computing_in(dtype):
        expected = reference(name, dtype)
        trainer = tfpar.Trainer(case.build, STRATEGIES[strategy](), seed=0)
        found = train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)
    assert not list(differences(found, expected, dtype))
