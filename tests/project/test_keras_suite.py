"""A sample of Keras' own tests under every strategy, and how the command that runs all of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.keras_suite import __main__ as command
from tests.keras_suite import expected, processes

SAMPLE = [
    "callbacks/learning_rate_scheduler_test.py::LearningRateSchedulerTest::test_updates_learning_rate",
    "trainers/trainer_test.py::TestTrainer::test_evaluate_flow_graph_fn",
    "trainers/trainer_test.py::TestTrainer::test_steps_per_epoch_match_multi_epoch_non_jit",
]
# Stand for tests of Keras.
REFUSED = """
import keras, numpy as np

def test_of_inputs_that_do_not_fit():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
"""


@pytest.mark.extended
@pytest.mark.slow_start
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_a_sample_passes_or_is_listed_and_refusals_are_detected(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "refused_test.py").write_text(REFUSED)
    records = processes.run(strategy, [*SAMPLE, str(tmp_path / "refused_test.py")], seconds=120)
    (refused,) = records.keys() - set(SAMPLE)
    kind, why = command.verdict(strategy, refused, records.pop(refused))
    assert kind == command.REFUSED
    assert "shapes of the model's inputs" in why
    assert sorted(records) == SAMPLE
    for test, result in records.items():
        kind, why = command.verdict(strategy, test, result)
        assert kind in (command.PASSED, command.LISTED), f"{test} is {kind}: {why}"
        assert result["calls"], f"{test} trains nothing"


def record(outcome: str, *refusals: str, error: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "calls": 1, "refusals": list(refusals), "error": error, "where": ""}


def test_only_listed_tests_may_end_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = expected.Expected("a/*::test_b*", "^ValueError: no", "Some reason.", ("mirrored",))
    monkeypatch.setattr(expected, "EXPECTED", [listed])
    refused = record("failed", "ValueError: no way", error="AssertionError: x")
    cases = {
        ("mirrored", "a/c_test.py::test_b"): command.LISTED,
        ("pipeline", "a/c_test.py::test_b"): command.REFUSED,
        ("mirrored", "b/c_test.py::test_b"): command.REFUSED,
    }
    for (strategy, test), wanted in cases.items():
        assert command.verdict(strategy, test, refused)[0] == wanted
    assert command.verdict("mirrored", "a/c_test.py::test_b", record("passed")) == (command.PASSED, "")
    assert command.verdict("mirrored", "a/c_test.py::test_b", record("crashed"))[0] == command.FAILED


def test_results_stay_until_they_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command.Results(path).add({name: record("passed") for name in "abc"})
    results = command.Results(path)
    results.forget(name for name in "ac")
    results.add({"d": record("failed")})
    assert list(command.Results(path).records) == ["b", "d"]
