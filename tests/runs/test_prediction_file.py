"""The `prediction.json` of every run, and the plans that are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import command
from tests.support.command import settings
from tfpar import config
from tfpar.planning.costs import Curve, MachineCosts, ModelCosts
from tfpar.planning.history import machine_name
from tfpar.planning.layouts import Layout
from tfpar.planning.ranking import rank
from tfpar.planning.rows import PredictedStep
from tfpar.runs import stored_plans

OWN = """
import keras, numpy as np, tensorflow as tf, tfpar

class Small(tfpar.Trainer):
    reads = ("seed", "training.global_batch_size")
    validation_data, num_train_examples = None, 72

    def __init__(self, run, strategy):
        keras.utils.set_random_seed(run.seed)
        rows = np.random.default_rng(0).normal(size=[72, 5])
        dataset = tf.data.Dataset.from_tensor_slices((rows, rows.sum(axis=1, keepdims=True)))
        self.train_data = dataset.shuffle(72, seed=run.seed).batch(run.training.global_batch_size)
        super().__init__(build_model, strategy, run.seed)

def build_model():
    layers = [keras.Input([5]), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model
"""
SMALL = ["trainer=own.Small", "training.global_batch_size=16", "training.epochs=2", "callbacks.tensorboard=false"]
DEVICES = ["CPU:0", "CPU:1"]
AUTO = 'strategy.devices=["CPU:0", "CPU:1"]'
LAYOUTS = {
    "mirrored": Layout(2),
    "mirrored with shards": Layout(2, shard="optimizer"),
    "pipeline": Layout(num_stages=2, num_microbatches=4),
    "single_device": Layout(),
}


def plan_text(*layouts: Layout, spread: float = 0.0, memory_bytes: int | None = None, devices: int = 2) -> str:
    """A plan that takes the first of some layouts."""
    model = ModelCosts("mlp", 9, 36, 36, 36, (36,), 16, Curve((16,), (0.1,)), 0.01, spread=spread)
    machine = MachineCosts("CPU", devices, devices, memory_bytes=memory_bytes)
    steps = [PredictedStep(one, 0.1 + 0.1 * place, {}, 5000, 8) for place, one in enumerate(layouts)]
    return rank(steps, [], model, machine, devices=DEVICES).to_json()


def store(text: str, *overrides: str) -> None:
    """Store a plan as an earlier command of the planner would have."""
    stored_plans.store(stored_plans.path_of(config.load(None, [*SMALL, *overrides]), "CPU"), text)


def train(call: command.InProcess, directory: str, *overrides: str) -> command.Outcome:
    return call("--directory", directory, *settings(*SMALL, *overrides))


def by_hand(layout: Layout) -> list[str]:
    own = {"device": "CPU:0"} if layout.kind == "single_device" else {"devices": DEVICES}
    return [
        f"strategy.{key}={json.dumps(value) if key != 'kind' else value}"
        for key, value in (layout.settings | own).items()
    ]


# prediction.json


def prediction(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "prediction.json").read_text())
    return found


def test_a_run_that_nobody_planned_writes_what_was_measured(call: command.InProcess, tmp_path: Path) -> None:
    assert train(call, "run", 'strategy.devices=["CPU:0"]').code == 0
    found = prediction(tmp_path / "run")
    assert found.pop("measured_step_seconds") > 0
    assert found.pop("measured_memory_bytes") >= 0
    assert found == {
        "layout": "SingleDevice",
        "planned_step_seconds": None,
        "planned_memory_bytes": None,
        "machine": machine_name("CPU"),
    }


def test_a_pipeline_that_nobody_planned_has_the_prediction_of_its_own_preview(
    call: command.InProcess, tmp_path: Path
) -> None:
    assert train(call, "run", *by_hand(LAYOUTS["pipeline"])).code == 0
    assert prediction(tmp_path / "run")["planned_step_seconds"] > 0


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{}], "measured": {}, "notes": [], "take": null}'])
def test_a_stored_plan_that_holds_something_else_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert stored_plans.read(tmp_path / "plan.json") is None


def test_a_stored_plan_is_that_of_a_step_and_of_a_trainers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def path(*overrides: str) -> Path:
        return stored_plans.path_of(config.load(None, overrides), "CPU")

    assert path("training.epochs=3", "strategy.kind=single_device", "callbacks.tensorboard=false") == path()
    assert path("training.global_batch_size=8") != path()
    assert path("model.width=8") != path()
    (tmp_path / "other.py").write_text("first = 1")
    first = path("trainer=other.Trainer")
    (tmp_path / "other.py").write_text("second = 2")
    assert path("trainer=other.Trainer") != first
