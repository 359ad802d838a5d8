"""How long a plan takes: the findings of the benchmark, and a first step of the real thing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

import tfpar
from benchmarks import harness, plan_models, plan_seconds, plan_seconds_worker
from benchmarks.plan_seconds import PLAN_SECONDS, PlannedConfiguration, measure
from benchmarks.process import WorkerError


@pytest.mark.parametrize(("first_step_seconds", "share"), [(8.0, 1.5), (40.0, 0.75)])
def test_a_plan_may_take_a_minute_or_three_first_steps_where_they_are_longer(
    first_step_seconds: float, share: float
) -> None:
    large = {"planning_seconds": 90.0, "first_step_seconds": first_step_seconds}
    result = harness.Result(PLAN_SECONDS, [{"transformer": large, "default run": {"planning_seconds": 61.0}}])
    assert [result.found(finding) for finding in result.findings] == [share, 61.0]
    assert [result.met(finding) for finding in result.findings] == [share <= 1, False]


def test_the_first_step_is_timed_from_the_model_function_on(
    logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = mock.Mock()
    planned.return_value.model.seconds, planned.return_value.model.spread = 3.0, 0.02
    monkeypatch.setattr(tfpar, "plan", planned)
    output: Any = plan_seconds_worker.seconds_of("many tiny layers", 8, logical_cpus[:2])
    assert 0 < output["planning_seconds"] < output["first_step_seconds"]
    assert (output["measuring_seconds"], output["spread"]) == (3.0, 0.02)
    assert planned.call_args.args[0] is plan_models.many_tiny_layers
    assert planned.call_args.kwargs == {"devices": logical_cpus[:2]}


@pytest.mark.parametrize(("code", "is_output"), [(0, True), (1, True), (2, False)])
def test_a_plan_that_is_too_noisy_to_rank_is_timed_and_an_error_is_none(
    code: int, is_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mock.Mock(return_value=subprocess.CompletedProcess([], code, "", "error: no such configuration"))
    monkeypatch.setattr(plan_seconds.subprocess, "run", run)
    setting = PlannedConfiguration("digits")
    if is_output:
        assert measure(setting)["planning_seconds"] >= 0
        words = ["-m", "tfpar.plan", "--config", "digits", "--logical_cpus", "2"]
        assert run.call_args.args[0] == [sys.executable, *words]
    else:
        with pytest.raises(WorkerError, match="exit status 2: error: no such configuration"):
            measure(setting)
