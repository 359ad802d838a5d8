"""`strategy.kind = "auto"` on several devices takes the layout of a plan, which is stored for later runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import settings
from tfpar import config
from tfpar.layout import Layout
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Devices, Measured, NotMeasured, Plan, ranked
from tfpar.runs.planning import stored_plans
from tfpar.runs.planning.plan_devices import PlanDevices, planned_devices

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

def build_model(width):
    layers = [keras.Input([5]), keras.layers.Dense(width, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model
"""
SMALL = ["trainer=own.Small", "training.global_batch_size=16", "training.epochs=2", "callbacks.tensorboard=false"]
# The last of the four of the tests: TensorFlow then needs four, as it has.
DEVICES = PlanDevices(("CPU:2", "CPU:3"), are_named=True)
AUTO = 'strategy.devices=["CPU:2", "CPU:3"]'
LAYOUTS = {
    "mirrored": Layout(2),
    "mirrored with shards": Layout(2, shard="optimizer"),
    "pipeline": Layout(num_stages=2, num_microbatches=4),
    "single_device": Layout(),
}


def plan_of(*layouts: Layout) -> Plan:
    """A plan in which some layouts were measured, the fastest first."""
    facts = ModelFacts("mlp", 9, 16, 36, (36,), 36)
    measured = {layout: Measured((0.1 + 0.1 * place,)) for place, layout in enumerate(layouts)}
    return ranked(measured, facts, Devices("CPU", 2), DEVICES.settings_of)


def store(plan: Plan, *overrides: str) -> None:
    """Store a plan as an earlier command of the planner would have."""
    stored_plans.store(stored_plans.plan_path(config.load(None, [*SMALL, *overrides]), DEVICES), plan.to_json())


def train(call: command.InProcess, directory: str, *overrides: str) -> command.Outcome:
    return call("--directory", directory, *settings(*SMALL, *overrides))


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process measures a plan."""
    monkeypatch.setattr("tfpar.runs.planning.plan_run.make_plan", lambda *_: pytest.fail("it was measured"))


def by_hand(layout: Layout) -> list[str]:
    settings = DEVICES.settings_of(layout)
    return [f"strategy.{key}={json.dumps(value) if key != 'kind' else value}" for key, value in settings.items()]


@pytest.mark.few(1)
@pytest.mark.usefixtures("never_measured")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_run_is_that_of_the_same_layout_chosen_by_hand(name: str, call: command.InProcess, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    store(plan_of(layout))
    chosen = train(call, "auto", AUTO)
    named = train(call, "named", *by_hand(layout))
    assert (chosen.code, named.code) == (0, 0), chosen.err + named.err
    note = "chosen by the planner: 100 ms a step; python -m tfpar.plan shows all"
    assert note in " ".join(chosen.out.split())
    assert "planner" not in named.out
    command.assert_same_weights(tmp_path / "auto", tmp_path / "named")
    assert command.metrics(tmp_path / "auto") == command.metrics(tmp_path / "named")


@pytest.mark.usefixtures("never_measured")
def test_a_resumed_run_takes_the_recorded_choice_again(call: command.InProcess, tmp_path: Path) -> None:
    store(plan_of(Layout(2)))
    assert train(call, "run", AUTO).code == 0
    store(plan_of(Layout()))  # measured anew, and otherwise
    resumed = train(call, "run", AUTO, "training.epochs=3")
    assert resumed.code == 0, resumed.err
    assert "Mirrored over 2 replicas" in resumed.out
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["rows"][0]["layout"] == "Mirrored(2)"
    assert 'kind = "auto"' in (tmp_path / "run" / "config.toml").read_text()


def test_one_device_is_never_measured(call: command.InProcess, never_measured: None, tmp_path: Path) -> None:
    trained = train(call, "run", 'strategy.devices=["CPU:0"]')
    assert trained.code == 0, trained.err
    assert "planner" not in trained.out
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_run_in_which_no_layout_trains_is_refused(
    call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = dataclasses.replace(plan_of(), others=(NotMeasured(Layout(), "ran out of memory"),))
    monkeypatch.setattr("tfpar.runs.planning.plan_run.make_plan", lambda *_: empty)
    refused = train(call, "run", AUTO)
    assert refused.code == 1
    assert "needs a layout that trains, and none did (SingleDevice: ran out of memory)" in refused.err
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.extended
@pytest.mark.multi_process
def test_without_a_plan_the_layout_is_measured_in_other_processes(
    call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpar.runs.planning.chosen_layout.USUAL_BUDGET_SECONDS", 0.1)
    trained = train(call, "run", AUTO)
    assert trained.code == 0, trained.err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert len(plan["rows"]) == 2
    assert "chosen by the planner" in trained.out
    again = train(call, "again", AUTO)
    assert json.loads((tmp_path / "again" / "plan.json").read_text()) == plan, "an earlier plan is taken again"
    assert again.code == 0


@pytest.mark.multi_process
def test_a_run_that_cannot_be_measured_is_one_sentence(call: command.InProcess) -> None:
    refused = train(call, "run", AUTO, "seed=7", "trainer=own.NoSuchTrainer")
    assert refused.code == 1
    assert "NoSuchTrainer" in refused.err
    assert 'set strategy.kind to another kind than "auto"' in refused.err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": 3}', '{"rows": [{}], "devices": {}}', '{"rows": [], "devices": {}}']
)
def test_a_stored_plan_that_holds_something_else_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert stored_plans.read(tmp_path / "plan.json") is None


def test_a_stored_plan_is_for_one_model_batch_devices_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def path(*overrides: str, devices: PlanDevices = DEVICES, num_workers: int = 1) -> Path:
        return stored_plans.plan_path(config.load(None, overrides), devices, num_workers)

    assert path("training.epochs=3", "strategy.kind=single_device", "callbacks.tensorboard=false") == path()
    assert path("training.global_batch_size=8") != path()
    assert path("model.width=8") != path()
    assert path("strategy.batch_dependent_layers=gather") != path()
    assert path(devices=PlanDevices(("CPU:0", "CPU:2"), are_named=True)) != path()
    assert path(num_workers=2) != path()
    (tmp_path / "other.py").write_text("first = 1")
    first = path("trainer=other.Trainer")
    (tmp_path / "other.py").write_text("second = 2")
    assert path("trainer=other.Trainer") != first
    before = path()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert path() != before


@pytest.mark.parametrize(
    ("overrides", "number", "usual", "names", "are_named"),
    [
        ([], None, 1, ("CPU:0",), False),
        ([], None, 2, ("CPU:0", "CPU:1"), False),
        (["strategy.num_logical_cpus=3"], None, 2, ("CPU:0", "CPU:1", "CPU:2"), False),
        (["strategy.num_logical_cpus=3"], 2, 2, ("CPU:0", "CPU:1"), False),
        (['strategy.devices=["CPU:1", "CPU:3"]'], None, 2, ("CPU:1", "CPU:3"), True),
        (['strategy.devices=["CPU:1", "CPU:3"]'], 1, 2, ("CPU:1",), True),
    ],
)
def test_a_plan_is_for_the_devices_that_are_there(
    overrides: list[str], number: int | None, usual: int, names: tuple[str, ...], are_named: bool
) -> None:
    strategy = config.load(None, overrides).strategy
    assert planned_devices(strategy, number, usual) == PlanDevices(names, are_named)


def test_more_devices_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfpar.cluster.configured_devices", lambda devices: ["GPU:0", "GPU:1"])
    with pytest.raises(ValueError, match=r"at most 2, the number of devices here .*run it on the machine that has"):
        planned_devices(config.Auto(), 4)
