"""Copies of variables on GPUs for a checkpoint: together in one function. Logical CPUs take the place of GPUs."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small
from tfpar.checkpoint import host_copies, model_state

pytestmark = pytest.mark.usefixtures("logical_cpus")

build = parity_cases.classifier(
    lambda: keras.optimizers.Adam(0.01),
    layers=lambda: [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.3, seed=5)],
)
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single_device": lambda: tfpar.SingleDevice("CPU:1"),
    "mirrored": lambda: tfpar.Mirrored(["CPU:1", "CPU:2"]),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def trained(request: pytest.FixtureRequest, logical_cpus: list[str]) -> tfpar.Trainer:
    trainer = tfpar.Trainer(build, STRATEGIES[request.param](), seed=0)
    trainer.fit(small.data(), verbose=0)
    return trainer


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CPUs count as GPUs; a number for each variable that is read by itself."""
    monkeypatch.setattr(host_copies, "KINDS", ("CPU",))
    read, alone = model_state._array, []
    monkeypatch.setattr(model_state, "_array", lambda variable: (alone.append(1), read(variable))[1])
    return alone


def test_the_copies_are_the_values_one_by_one(trained: tfpar.Trainer, on_gpus: list[int]) -> None:
    variables = model_state.state_variables(trained.model)
    expected = {name: variable.numpy() for name, variable in variables.items()}
    arrays, finite = model_state.read_at_once(trained.model)
    assert finite
    assert list(arrays) == list(expected)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
        assert array.dtype == expected[name].dtype
    num_together = sum(name.startswith(("weights/", "optimizer/")) for name in arrays)
    assert len(on_gpus) <= len(arrays) - num_together, "at most metrics, of which each replica holds a part"


@pytest.mark.usefixtures("on_gpus")
def test_the_copies_stay_as_they_are_when_training_continues(trained: tfpar.Trainer) -> None:
    arrays, _ = model_state.read_at_once(trained.model)
    before = {name: array.copy() for name, array in arrays.items()}
    trained.fit(small.data(), verbose=0)
    later, _ = model_state.read_at_once(trained.model)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert any(not np.array_equal(later[name], array) for name, array in arrays.items())


@pytest.mark.usefixtures("on_gpus")
def test_a_weight_that_is_not_finite_is_found(trained: tfpar.Trainer) -> None:
    weight, slot = trained.model.weights[0], trained.model.optimizer.variables[-1]
    good, of_slot = weight.numpy(), slot.numpy()
    slot.assign(np.full(slot.shape, np.inf))
    assert model_state.read_at_once(trained.model)[1], "the optimizer may repair its own state"
    slot.assign(of_slot)
    weight.assign(np.full(weight.shape, np.nan))
    assert not model_state.read_at_once(trained.model)[1]
    weight.assign(good)
    assert model_state.read_at_once(trained.model)[1]
