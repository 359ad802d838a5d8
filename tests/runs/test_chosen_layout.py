"""`strategy.kind = "auto"` on several devices takes the layout of a plan, and the `prediction.json` of every run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support import command
from tests.support.command import settings
from tfpar import config
from tfpar.planning.costs import Curve, MachineCosts, ModelCosts
from tfpar.planning.history import history, machine_name
from tfpar.planning.layouts import Layout
from tfpar.planning.ranking import UNTESTED, rank
from tfpar.planning.rows import PredictedStep
from tfpar.planning.stated import Stated
from tfpar.runs import chosen_layout, plan_run, stored_plans
from tfpar.runs.prediction_file import layout_of
from tfpar.strategies import Strategy

OWN = """
import keras, numpy as np, tensorflow as tf, tfpar

class Small(tfpar.Trainer):
    reads = ("seed", "training.global_batch_size")
    validation_data, num_train_examples, width = None, 72, 8

    def __init__(self, run, strategy):
        keras.utils.set_random_seed(run.seed)
        rows = np.random.default_rng(0).normal(size=[72, 5])
        dataset = tf.data.Dataset.from_tensor_slices((rows, rows.sum(axis=1, keepdims=True)))
        self.train_data = dataset.shuffle(72, seed=run.seed).batch(run.training.global_batch_size)
        super().__init__(lambda: build_model(self.width), strategy, run.seed)

class Wide(Small):
    width = 100_000

def build_model(width):
    layers = [keras.Input([5]), keras.layers.Dense(width, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
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


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process measures a plan."""
    monkeypatch.setattr("tfpar.runs.chosen_layout._measured_plan", lambda *_: pytest.fail("it was measured"))


def by_hand(layout: Layout) -> list[str]:
    own = {"device": "CPU:0"} if layout.kind == "single_device" else {"devices": DEVICES}
    return [
        f"strategy.{key}={json.dumps(value) if key != 'kind' else value}"
        for key, value in (layout.settings | own).items()
    ]


@pytest.mark.few(2)
@pytest.mark.usefixtures("never_measured")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_run_is_that_of_the_same_layout_chosen_by_hand(name: str, call: command.InProcess, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    store(plan_text(layout))
    chosen = train(call, "auto", AUTO)
    named = train(call, "named", *by_hand(layout))
    assert (chosen.code, named.code) == (0, 0), chosen.err + named.err
    note = "chosen by the planner: 100 ms a step predicted; python -m tfpar.plan shows all"
    assert note in " ".join(chosen.out.split())
    assert "planner" not in named.out
    command.assert_same_weights(tmp_path / "auto", tmp_path / "named")
    assert command.metrics(tmp_path / "auto") == command.metrics(tmp_path / "named")
    assert json.loads((tmp_path / "auto" / "prediction.json").read_text())["layout"] == str(layout)


def test_the_cores_of_planned_devices_are_said_where_the_run_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfpar.cluster.cores.num_allowed_cores", lambda: 8)
    run = config.load(None, ["strategy.num_logical_cpus=4"])
    plan = json.loads(plan_text(Layout(), devices=4))
    assert "a step predicted on devices of 2 cores;" in chosen_layout._taken(run, plan).note
    plan = json.loads(plan_text(Layout(2), devices=2))
    named = config.load(None, ["strategy.num_logical_cpus=4", AUTO])
    assert "a step predicted;" in chosen_layout._taken(named, plan).note


@pytest.mark.usefixtures("never_measured")
def test_a_resumed_run_takes_the_recorded_choice_again(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_text(Layout(2)))
    assert train(call, "run", AUTO).code == 0
    store(plan_text(Layout()))  # measured anew, and otherwise
    resumed = train(call, "run", AUTO, "training.epochs=3")
    assert resumed.code == 0, resumed.err
    assert "Mirrored over 2 replicas" in resumed.out
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["take"] == "Mirrored(2)"
    assert 'kind = "auto"' in (tmp_path / "run" / "config.toml").read_text()


def test_one_device_is_never_measured(call: command.InProcess, never_measured: None, tmp_path: Path) -> None:
    trained = train(call, "run", 'strategy.devices=["CPU:0"]')
    assert trained.code == 0, trained.err
    assert "planner" not in trained.out
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.usefixtures("never_measured")
def test_a_noisy_measurement_falls_back_to_mirrored(call: command.InProcess) -> None:
    store(plan_text(Layout(), Layout(2), spread=0.6))
    trained = train(call, "run", AUTO)
    assert trained.code == 0, trained.err
    assert "Mirrored over 2 replicas on CPU:0, CPU:1, as the measurement of the planner was too noisy" in " ".join(
        trained.out.split()
    )


@pytest.mark.usefixtures("never_measured")
def test_a_run_that_fits_nowhere_is_refused_with_what_it_lacks(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_text(Layout(), Layout(2), memory_bytes=4000))
    refused = train(call, "run", AUTO)
    assert refused.code == 1
    assert "No layout fits in the 4.00 kB of a device. The nearest is SingleDevice: it lacks 1.00 kB" in refused.err
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.extended
@pytest.mark.multi_process
def test_without_a_plan_the_layout_is_measured_in_another_process(call: command.InProcess, tmp_path: Path) -> None:
    trained = train(call, "run", AUTO)
    assert trained.code == 0, trained.err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["measured"]["num_measured"] == 2
    assert "chosen by the planner" in trained.out or "too noisy" in trained.out
    again = train(call, "again", AUTO)
    assert json.loads((tmp_path / "again" / "plan.json").read_text()) == plan, "an earlier plan is taken again"
    assert again.code == 0


@pytest.mark.multi_process
def test_a_run_that_cannot_be_measured_is_one_sentence(call: command.InProcess) -> None:
    refused = train(call, "run", AUTO, "seed=7", "trainer=own.NoSuchTrainer")
    assert refused.code == 1
    assert "NoSuchTrainer" in refused.err
    assert 'set strategy.kind to another kind than "auto"' in refused.err


# prediction.json


def prediction(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "prediction.json").read_text())
    return found


def test_a_run_that_nobody_planned_writes_what_was_measured(call: command.InProcess, tmp_path: Path) -> None:
    assert train(call, "run", 'strategy.devices=["CPU:0"]').code == 0
    found = prediction(tmp_path / "run")
    assert found.pop("measured_step_seconds") > 0
    memory_bytes = found.pop("measured_memory_bytes")
    assert memory_bytes is None or 0 < memory_bytes < 1e6, "TensorFlow counts no memory as small as this"
    assert found == {
        "layout": "SingleDevice",
        "planned_step_seconds": None,
        "previewed_step_seconds": None,
        "planned_memory_bytes": None,
        "machine": machine_name("CPU"),
    }


@pytest.mark.parametrize("devices", [["CPU:0"], DEVICES])
def test_a_run_on_cpus_writes_the_memory_of_its_tensors(
    devices: list[str], call: command.InProcess, tmp_path: Path
) -> None:
    kind = "single_device" if len(devices) == 1 else "mirrored"
    place = f'strategy.device="{devices[0]}"' if len(devices) == 1 else f"strategy.devices={json.dumps(devices)}"
    assert train(call, "run", "trainer=own.Wide", f"strategy.kind={kind}", place).code == 0
    weight_bytes = 4 * 7 * 100_000
    assert 3 * weight_bytes < prediction(tmp_path / "run")["measured_memory_bytes"] < 20 * weight_bytes


def test_a_run_of_an_earlier_plan_has_its_prediction(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_text(Layout(), Layout(2)))
    assert train(call, "run", *by_hand(Layout(2))).code == 0
    found = prediction(tmp_path / "run")
    assert (found["layout"], found["planned_step_seconds"], found["planned_memory_bytes"]) == ("Mirrored(2)", 0.2, 5000)


def store_stated(text: str, *overrides: str) -> None:
    path = stored_plans.path_of(config.load(None, [*SMALL, *overrides]), "CPU", is_stated=True)
    stored_plans.store(path, text)


def test_the_prediction_is_of_the_last_plan_that_has_the_layout(call: command.InProcess, tmp_path: Path) -> None:
    recomputed = Layout(num_stages=2, num_microbatches=4, recompute=True)
    store(plan_text(Layout(), Layout(2)))
    store_stated(plan_text(Layout(2), recomputed))
    for name, layout, seconds in (("last", Layout(2), 0.1), ("alone", recomputed, 0.2)):
        assert train(call, name, *by_hand(layout)).code == 0
        found = prediction(tmp_path / name)
        assert (found["layout"], found["planned_step_seconds"]) == (str(layout), seconds)
    store(plan_text(Layout(), Layout(2)))  # again, and later
    assert train(call, "again", *by_hand(Layout(2))).code == 0
    assert prediction(tmp_path / "again")["planned_step_seconds"] == 0.2


def test_a_plan_for_stated_devices_is_no_choice_of_auto(
    call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def measure(run: config.Run, number: int) -> dict[str, Any]:
        measured.append(number)
        plan: dict[str, Any] = json.loads(plan_text(Layout(2)))
        return plan

    monkeypatch.setattr("tfpar.runs.chosen_layout._measured_plan", measure)
    store_stated(plan_text(Layout()))
    assert train(call, "run", AUTO).code == 0
    assert measured == [2]
    assert prediction(tmp_path / "run")["layout"] == "Mirrored(2)"


@pytest.mark.parametrize(
    ("stated", "measured_layouts", "ending"),
    [
        (Stated(), None, ".json"),
        (Stated(memory_bytes=4 * 10**9), None, ".stated.json"),
        (Stated(), 0, ".stated.json"),
        (Stated(num_devices=4), None, ".stated.json"),
        (Stated(num_devices=2), None, None),  # with half of the cores that a run on two devices has
        (Stated(num_devices=5), None, None),
        (Stated(num_hosts=2), None, None),
        (Stated(device_speed=1.5), None, None),
        (Stated(bandwidth=1e9), None, None),
    ],
    ids=str,
)
@pytest.mark.usefixtures("logical_cpus")
def test_a_plan_is_stored_where_this_machine_has_what_is_stated(
    stated: Stated, measured_layouts: int | None, ending: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MachineCosts("CPU", 4, 4)
    model = ModelCosts("mlp", 9, 36, 36, 36, (36,), 16, Curve((16,), (0.1,)), 0.01)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfpar.cluster.cores.num_allowed_cores", lambda: 8)
    monkeypatch.setattr(plan_run, "check_trainer", lambda run: None)
    monkeypatch.setattr(plan_run, "planned", lambda *_: rank([PredictedStep(Layout(2), 0.1, {})], [], model, machine))
    plan_run.plan_of(config.load(None, SMALL), stated, 4, measured_layouts)
    found = [path.name.partition(".")[2] for path in tmp_path.glob("runs/.plans/*")]
    assert found == ([] if ending is None else [ending.removeprefix(".")])


def test_the_preview_of_a_pipeline_that_nobody_planned_is_no_prediction_of_the_planner(
    call: command.InProcess, tmp_path: Path
) -> None:
    assert train(call, "run", *by_hand(LAYOUTS["pipeline"])).code == 0
    found = prediction(tmp_path / "run")
    assert found["planned_step_seconds"] is None
    assert found["previewed_step_seconds"] > 0
    assert history(tmp_path, machine_name("CPU")) == UNTESTED


def test_a_planned_pipeline_has_both_predictions(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_text(Layout(), LAYOUTS["pipeline"]))
    assert train(call, "run", *by_hand(LAYOUTS["pipeline"])).code == 0
    found = prediction(tmp_path / "run")
    assert found["planned_step_seconds"] == 0.2
    assert found["previewed_step_seconds"] > 0
    assert "1 run of this machine" in history(tmp_path, machine_name("CPU"))


@pytest.mark.parametrize(
    ("layout", "by_hand_alone"),
    [
        (LAYOUTS["pipeline"], "strategy.balance=parameters"),
        (Layout(num_shards=2), 'strategy.layout={"kernel"=["model", "none"]}'),
    ],
    ids=["balance", "rules"],
)
def test_a_model_that_is_cut_in_another_way_than_planned_has_no_prediction(
    layout: Layout, by_hand_alone: str, call: command.InProcess, tmp_path: Path
) -> None:
    store(plan_text(Layout(), layout))
    assert train(call, "run", *by_hand(layout), by_hand_alone).code == 0
    assert not (tmp_path / "run" / "prediction.json").exists()


def test_shards_on_several_hosts_have_the_layout_that_the_planner_names() -> None:
    of_run = config.TensorParallel(num_shards=2, num_replicas=2)
    layout = layout_of(of_run, cast("Strategy", SimpleNamespace(num_workers=3)))
    assert str(layout) == "Hybrid(6 x TensorParallel(2), hosts=3)"


def test_a_recorded_step_is_no_measurement_for_the_history(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_text(Layout(), Layout(2)))
    assert call("--directory", "run", *settings(*SMALL, *by_hand(Layout(2))), "--profile", "1").code == 0
    found = prediction(tmp_path / "run")
    assert (found["planned_step_seconds"], found["measured_step_seconds"]) == (0.2, None)


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


@pytest.mark.parametrize(("num_planned", "is_found"), [(2, False), (4, True)])
def test_replicas_on_all_gpus_are_not_those_of_a_plan_for_some_of_them(num_planned: int, is_found: bool) -> None:
    machine = MachineCosts("GPU", num_planned, num_planned)
    model = ModelCosts("mlp", 9, 36, 36, 36, (36,), 16, Curve((16,), (0.1,)), 0.01)
    plan = json.loads(rank([PredictedStep(Layout(num_planned), 0.1, {})], [], model, machine).to_json())
    run = config.load(None, [*SMALL, "strategy.kind=mirrored"])
    assert chosen_layout._has_layout_of(run, plan, 4) == is_found
