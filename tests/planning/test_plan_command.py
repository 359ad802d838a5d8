"""`python -m tfpar.plan` and `tfpar.plan()`."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests import ROOT
from tests.planning.test_ranking import planned, step
from tests.support import small
from tfpar import config
from tfpar.planning.costs import MachineCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.plan import Plan

SMALL = [
    "trainer=tfpar.trainers.regression.Regression", "model.name=linear", "data.source=generated",
    "data.num_examples=192", "training.global_batch_size=16", "data.shuffle_buffer=64", "data.normalization=none",
]  # fmt: skip


def run(
    *arguments: str, folder: Path, module: str = "", code: str = "", with_tensorflow: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command, or another module or program; without TensorFlow where it must be refused before that starts."""
    with_tensorflow = with_tensorflow or bool(module or code)
    before = f"{ROOT}" if with_tensorflow else f"{folder}/without:{ROOT}"
    program = ["-c", code] if code else ["-m", module or "tfpar.plan"]
    (folder / "without").mkdir(exist_ok=True)
    (folder / "without" / "tensorflow.py").write_text("raise ImportError('TensorFlow must not start')")
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": before},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


# On a loaded machine the measurements vary; what is tested here is not their spread.
ANY_SPREAD = """
import math, runpy
from tfpar.planning import comparison, ranking
ranking.MOST_SPREAD = comparison.MOST_SPREAD = math.inf
runpy.run_module("tfpar.plan", run_name="__main__", alter_sys=True)
"""


def plan_and_train(folder: Path, planning: list[str], training: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan a run with the commands of a user, and train it.

    Returns:
        The plan, and the `prediction.json` of the run.
    """
    planned = run(*planning, "--json", folder=folder, code=ANY_SPREAD)
    assert planned.returncode == 0, planned.stderr
    trained = run(*training, "--directory", "run", folder=folder, module="tfpar.train")
    assert trained.returncode == 0, trained.stderr
    assert (folder / "run" / "model.keras").exists()
    return json.loads(planned.stdout), json.loads((folder / "run" / "prediction.json").read_text())


def set_all(overrides: list[str]) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["now"], "Arguments must be flags, received 'now'."),
        (["--devices", "0"], "--devices must be at least 1, received 0."),
        (["--devices", "1000000"], "--devices must be at most 512, received 1000000."),
        (["--devices", "two"], "--devices must be an integer, received 'two'."),
        (["--hosts", "0"], "--hosts must be at least 1, received 0."),
        (["--hosts", "-1"], "--hosts must be at least 1, received -1."),
        (["--logical_cpus", "0"], "--logical_cpus must be at least 1, received 0."),
        (["--device_speed", "0"], "--device_speed must be from 0.001 to 1000, received 0.0: 1.5 is a device"),
        (["--device_speed", "nan"], "--device_speed must be from 0.001 to 1000, received nan"),
        (["--device_speed", "-2"], "--device_speed must be from 0.001 to 1000, received -2.0"),
        (["--device_speed", "1e-320"], "--device_speed must be from 0.001 to 1000, received 1e-320"),
        (["--memory", "24"], "--memory must be a size above 0, such as 24GiB or 512MB, received '24'."),
        (["--memory", "0GB"], "--memory must be a size above 0, such as 24GiB or 512MB, received '0GB'."),
        (["--bandwidth", "10GB"], "--bandwidth must be a bandwidth above 0, such as 10GB/s or 25Gbit/s, received '10"),
        (["--memmory", "24GiB"], "--memmory is no flag. Did you mean --memory?"),
        (["--config", "digts"], "Did you mean digits"),
        (["--set", "strategy.kind=no"], "strategy.kind"),
        (["--write", "plan.txt"], "--write must name a file that ends with .toml, received 'plan.txt'."),
        (["--write", "no/plan.toml"], "--write must name a file in a folder that exists, received 'no/plan.toml'."),
        (["--write", "mine.toml"], "--write overwrites plans of its own only, and mine.toml holds something else"),
    ],
)  # fmt: skip
def test_wrong_flags_are_one_sentence_before_tensorflow_starts(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    ended = run(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "mine.toml").read_text() == "seed = 1\n"


@pytest.mark.multi_process
def test_a_worker_of_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(job))
    ended = run(folder=tmp_path)
    assert ended.returncode == 2
    assert "a job of 2 workers, and the planner measures one machine" in ended.stderr


@pytest.mark.multi_process
def test_a_run_is_measured_ranked_written_and_trained(tmp_path: Path) -> None:
    arguments = [*set_all(SMALL), "--logical_cpus", "2", "--write", "plan.toml"]
    plan, prediction = plan_and_train(tmp_path, arguments, ["--config", "plan.toml"])
    assert {"SingleDevice", "Mirrored(2)"} <= {row["layout"] for row in plan["rows"]}
    assert all(row["step_seconds"] > 0 and row["memory_bytes"] > 0 for row in plan["rows"])
    assert (tmp_path / "plan.toml").read_text().startswith(f"# Written by python -m tfpar.plan: {plan['take']}, ")
    written = config.load(tmp_path / "plan.toml").strategy
    assert {key: getattr(written, key) for key in plan["rows"][0]["settings"]} == plan["rows"][0]["settings"]
    assert [path.suffixes for path in (tmp_path / "runs" / ".plans").iterdir()] == [[".json"]]
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan | {"command": ""}
    assert prediction["layout"] == plan["take"]
    assert prediction["planned_memory_bytes"] > 0


@pytest.mark.multi_process
def test_a_run_has_the_prediction_of_a_plan_with_stated_memory(tmp_path: Path) -> None:
    planning = [*set_all(SMALL), "--logical_cpus", "2", "--memory", "4GB", "--measured_layouts", "0"]
    two = ["strategy.kind=mirrored", "strategy.num_logical_cpus=2"]
    plan, prediction = plan_and_train(tmp_path, planning, set_all([*SMALL, *two]))
    row = next(row for row in plan["rows"] if row["layout"] == "Mirrored(2)")
    assert (prediction["layout"], prediction["planned_step_seconds"]) == ("Mirrored(2)", row["step_seconds"])
    assert prediction["planned_memory_bytes"] > 0


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("iter(())", "data.function must name a function that returns one tf.data.Dataset of (input, label) examples"),
        (
            "tf.data.Dataset.from_tensor_slices((tf.zeros([0, 4]), tf.zeros([0], tf.int64)))",
            "The dataset of own.rows holds no examples: choose another split, or fill it.",
        ),
    ],
    ids=["no dataset", "empty"],
)
def test_wrong_data_are_one_sentence(returned: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import tensorflow as tf\n\ndef rows():\n    return {returned}\n")
    overrides = ["data.source=python", "data.function=own.rows", "data.num_classes=2"]
    ended = run(*set_all(overrides), folder=tmp_path, with_tensorflow=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert said in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.fixture(scope="module")
def plan(logical_cpus: list[str]) -> Plan:
    return tfpar.plan(small.build_model, small.data(), devices=["CPU:0", "CPU:1"])


@pytest.mark.extended
def test_the_function_ranks_layouts_of_the_devices_and_shows_a_table(plan: Plan) -> None:
    layouts = [str(row.layout) for row in plan.rows]
    assert {"SingleDevice", "Mirrored(2)", 'Mirrored(2, shard="optimizer")'} <= set(layouts)
    assert plan.model.batch == 8
    assert max(map(len, str(plan).splitlines())) <= 80
    assert "<table" in plan._repr_html_()


def test_the_plan_leaves_random_states_as_they_were(plan: Plan, logical_cpus: list[str]) -> None:
    keras.utils.set_random_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    drawn = float(tf.random.uniform([]))
    keras.utils.set_random_seed(3)
    tfpar.plan(small.build_model, small.data(), devices=["CPU:0"])
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert after == before
    assert float(tf.random.uniform([])) == drawn


@pytest.mark.extended
def test_one_device_gives_one_row_and_what_a_second_would_bring(logical_cpus: list[str]) -> None:
    plan = tfpar.plan(small.build_model, small.data(), devices=["CPU:0"])
    assert [str(row.layout) for row in plan.rows] == ["SingleDevice"]
    assert plan.taken is None or any(note.startswith("A second device would bring") for note in plan.notes)


class Branching(keras.Model):
    """A model that no graph of layers describes: its call reads numbers of the batch."""

    def __init__(self) -> None:
        super().__init__(name="branching")
        self.of_large, self.of_small = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        large, small = self.of_large(inputs), self.of_small(inputs)
        return tf.where(tf.raw_ops.Sum(input=inputs, axis=1, keep_dims=True) > 1, large, small)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "ranked", "reason"),
    [
        (
            Branching,
            {"SingleDevice", "Mirrored(2)", 'Mirrored(2, shard="optimizer")'},
            "must run on symbolic tensors of any batch size",
        ),
        (
            lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.UnitNormalization(axis=0, name="mixer")]),
            {"SingleDevice"},
            "received 'mixer', where an example depends on the others of its batch",
        ),
    ],
    ids=["a call on real tensors", "a layer that mixes examples"],
)
def test_a_model_that_cannot_be_cut_is_planned_without_pipelines(
    make: Callable[[], keras.Model], ranked: set[str], reason: str, logical_cpus: list[str]
) -> None:
    def build_model() -> keras.Model:
        model = make()
        model.compile("sgd", "mse")
        return model

    arrays = (np.ones([16, 4], "float32"), np.ones([16, 1], "float32"))
    plan = tfpar.plan(build_model, arrays, batch_size=8, devices=["CPU:0", "CPU:1"], measured_layouts=0)
    assert reason in plan.model.uncut
    assert not plan.model.blocks
    assert {str(row.layout) for row in plan.rows} == ranked
    assert all(row.step_seconds > 0 for row in plan.rows)
    refused = [one for one in plan.not_considered if one.startswith("pipelines (")]
    assert len(refused) == 1
    assert reason in refused[0]
    assert ("Mirrored(2)" in "".join(plan.not_considered)) == ("Mirrored(2)" not in ranked)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": lambda: small.data().take(0)}, ValueError, r"no example|empty|no batch"),
        ({"num_devices": lambda: 0}, ValueError, "num_devices must be at least 1"),
        ({"device_speed": lambda: 0}, ValueError, "device_speed must be from 0.001 to 1000"),
        ({"device_speed": lambda: "2"}, TypeError, "device_speed must be a number, received '2'"),
        ({"memory_bytes": lambda: "24GiB"}, TypeError, "memory_bytes must be a number of bytes, received '24GiB'"),
        ({"bandwidth": lambda: "1GB/s"}, TypeError, "bandwidth must be a number of bytes per second, received '1GB/s'"),
        ({"num_hosts": lambda: 0}, ValueError, "num_hosts must be at least 1"),
        ({"build_model": lambda: 3}, TypeError, "build_model must be a function"),
        ({"build_model": keras.Sequential}, TypeError, "build_model must be a function"),
        ({"devices": lambda: ["CPU:9"]}, ValueError, "devices must name different devices"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Callable[[], Any]], error: type[Exception], message: str, logical_cpus: list[str]
) -> None:
    given = {name: make() for name, make in arguments.items()}
    with pytest.raises(error, match=message):
        tfpar.plan(**{"build_model": small.build_model, "dataset": small.data(), **given})


def test_the_module_is_the_function_once_it_is_imported() -> None:
    assert callable(importlib.import_module("tfpar.plan"))


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, shard="optimizer"), Layout(1, 2, 4)], ids=str)
def test_the_layout_that_a_plan_takes_is_a_strategy_to_train_with(layout: Layout, logical_cpus: list[str]) -> None:
    plan = planned([step(layout, 1.0)], MachineCosts("CPU", 8, 8))
    assert plan.take is plan.take
    trainer = tfpar.Trainer(small.build_model, plan.take)
    assert trainer.strategy.device_names == logical_cpus[: layout.num_devices]
    assert type(trainer.strategy).__name__ == str(layout).partition("(")[0]
    trainer.fit(small.data(), verbose=0, steps_per_epoch=1)


@pytest.mark.parametrize(
    ("layout", "needs"), [(Layout(8), "8 on 1 host, received 4"), (Layout(2, num_hosts=2), "2 on 2 hosts, received 4")]
)
def test_a_layout_of_other_devices_is_no_strategy_here(layout: Layout, needs: str, logical_cpus: list[str]) -> None:
    with pytest.raises(ValueError, match=f"needs {needs} on this one"):
        assert planned([step(layout, 1.0)], MachineCosts("CPU", 8, 8)).take
