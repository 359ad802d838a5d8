"""`tfpar.plan()`: layouts of a model function, measured in this process."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tests.support.extent import is_whole
from tfpar.loops.step_functions import StepFunctions
from tfpar.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("short_laps")
DEVICES = ["CPU:0", "CPU:1"]
ARRAYS = (np.ones([16, 4], "float32"), np.ones([16, 1], "float32"))


@pytest.fixture(scope="module")
def plan(logical_cpus: list[str], short_laps: None) -> Plan:
    return tfpar.plan(small.build_model, small.data(), devices=DEVICES, budget_seconds=20)


def test_every_row_was_measured(plan: Plan) -> None:
    assert {"SingleDevice", "Mirrored(2)", "Pipeline(2, 8)"} & {str(row.layout) for row in plan.rows}
    assert len(plan.rows) > 2
    assert all(len(row.measured.laps) >= 3 and row.step_seconds > 0 for row in plan.rows)
    assert [row.rank for row in plan.rows] == sorted(row.rank for row in plan.rows)
    assert plan.facts.batch == 8
    assert plan.seconds < plan.budget_seconds + 30  # other tests run at the same time
    assert max(map(len, str(plan).splitlines())) <= 80


def test_the_strategy_of_a_plan_trains(plan: Plan, logical_cpus: list[str]) -> None:
    for row in plan.rows if is_whole() else plan.rows[:2]:
        strategy = Plan((row,), (), plan.facts, plan.devices).strategy
        assert strategy is not None
        assert set(strategy.device_names) <= set(DEVICES)
        tfpar.Trainer(small.build_model, strategy).fit(small.data(), verbose=0, steps_per_epoch=1)
    assert plan.strategy is plan.strategy


def test_a_plan_leaves_random_states_as_they_were(logical_cpus: list[str]) -> None:
    keras.utils.set_random_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    drawn = float(tf.random.uniform([]))
    keras.utils.set_random_seed(3)
    tfpar.plan(small.build_model, small.data(), devices=["CPU:0"])
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert after == before
    assert float(tf.random.uniform([])) == drawn


def test_a_layout_that_runs_out_of_memory_is_named(logical_cpus: list[str]) -> None:
    original = StepFunctions.loop

    def loop(functions: StepFunctions, kind: str, distributed: Any) -> Any:
        if len(functions._engine.device_names) > 1:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[8,4]")
        return original(functions, kind, distributed)

    with mock.patch.object(StepFunctions, "loop", loop):
        plan = tfpar.plan(small.build_model, small.data(), devices=DEVICES, budget_seconds=0.1)
    assert [str(row.layout) for row in plan.rows] == ["SingleDevice"]
    assert "Mirrored(2) (ran out of memory)" in str(plan)


class Branching(keras.Model):
    """A model that no graph of layers describes: its call reads numbers of the batch."""

    def __init__(self) -> None:
        super().__init__(name="branching")
        self.of_large, self.of_small = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        large, small = self.of_large(inputs), self.of_small(inputs)
        return tf.where(tf.raw_ops.Sum(input=inputs, axis=1, keep_dims=True) > 1, large, small)


@pytest.mark.parametrize(
    ("make", "measured", "reason"),
    [
        (Branching, {"SingleDevice", "Mirrored(2)"}, "must run on symbolic tensors"),
        (
            lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.UnitNormalization(axis=0, name="mixer")]),
            {"SingleDevice"},
            "'mixer', where an example depends on the others of its batch",
        ),
    ],
    ids=["a call on real tensors", "a layer that mixes examples"],
)
def test_a_model_that_cannot_be_cut_is_planned_without_pipelines(
    make: Callable[[], keras.Model], measured: set[str], reason: str, logical_cpus: list[str]
) -> None:
    def build_model() -> keras.Model:
        model = make()
        model.compile("sgd", "mse")
        return model

    plan = tfpar.plan(build_model, ARRAYS, batch_size=8, devices=DEVICES, budget_seconds=0.1)
    assert {str(row.layout) for row in plan.rows} == measured
    assert reason in plan.facts.uncut
    assert any(words.startswith("pipelines (") and reason in words for words in plan.not_considered)
    refused = {str(layout) for layout, _ in plan.others}
    assert ("Mirrored(2)" in refused) == ("Mirrored(2)" not in measured)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget_seconds": 0}, ValueError, "budget_seconds must be above 0 and at most 86400 .*received 0"),
        ({"budget_seconds": "45"}, TypeError, "budget_seconds must be a number of seconds, received '45'. Write 60"),
        ({"build_model": 3}, TypeError, "Pass the function itself"),
        ({"devices": ["CPU:9"]}, ValueError, "devices must name different devices"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, logical_cpus: list[str]
) -> None:
    with pytest.raises(error, match=message):
        tfpar.plan(**{"build_model": small.build_model, "dataset": ARRAYS, **arguments})


def test_a_built_model_is_refused() -> None:
    with pytest.raises(TypeError, match="build_model must be a function"):
        tfpar.plan(keras.Sequential(), ARRAYS)  # type: ignore[arg-type]


def test_a_worker_of_a_job_is_told_how_its_job_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(job))
    with pytest.raises(ValueError, match=r"tfpar.launch --num_workers 2 -- -m tfpar.plan"):
        tfpar.plan(small.build_model, ARRAYS)


def test_the_module_is_the_function_once_it_is_imported() -> None:
    assert callable(importlib.import_module("tfpar.plan"))
