"""`python -m tfpar.plan`, on one machine and under the launcher."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import command
from tfpar import config

SMALL = [
    "trainer=tfpar.trainers.regression.Regression", "model.name=linear", "data.source=generated",
    "data.num_examples=192", "training.global_batch_size=16", "data.shuffle_buffer=64", "data.normalization=none",
]  # fmt: skip
SET = [word for setting in SMALL for word in ("--set", setting)]
SHORT = ["--budget", "0.1"]


def run(*arguments: str, folder: Path, with_tensorflow: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a module; without TensorFlow where it must be refused before that starts."""
    (folder / "without").mkdir(exist_ok=True)
    (folder / "without" / "tensorflow.py").write_text("raise ImportError('TensorFlow must not start')")
    path = f"{ROOT}" if with_tensorflow else f"{folder}/without:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path}
    words = [sys.executable, "-m", *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.few(5)
@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["now"], "Arguments must be flags, received 'now'."),
        (["--devices", "0"], "--devices must be at least 1, received 0."),
        (["--devices", "65"], "--devices must be at most 64, received 65."),
        (["--budget", "0"], "--budget must be above 0 and at most 86400 (a day), received 0.0."),
        (["--budget", "nan"], "--budget must be above 0 and at most 86400 (a day), received nan."),
        (["--hosts", "2"], "--hosts is no flag."),
        (["--config", "digts"], "Did you mean digits"),
        (["--set", "strategy.kind=no"], "strategy.kind"),
        (["--write", "plan.txt"], "--write must name a file that ends with .toml, received 'plan.txt'."),
        (["--write", "no/plan.toml"], "--write must name a file in a folder that exists, received 'no/plan.toml'."),
        (["--write", "mine.toml"], "--write overwrites plans of its own only, and mine.toml holds something else"),
    ],
)
def test_wrong_flags_are_one_sentence_before_tensorflow_starts(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    ended = run("tfpar.plan", *arguments, folder=tmp_path, with_tensorflow=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "mine.toml").read_text() == "seed = 1\n"


@pytest.mark.multi_process
def test_a_run_is_measured_written_and_trained(
    tmp_path: Path, call: command.InProcess, logical_cpus: list[str]
) -> None:
    ended = run("tfpar.plan", *SET, *SHORT, "--json", "--write", "plan.toml", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    plan = json.loads(ended.stdout)
    assert {row["layout"] for row in plan["rows"]} == {"SingleDevice", "Mirrored(2)"}
    assert all(row["step_seconds"] > 0 and len(row["laps_seconds"]) >= 3 for row in plan["rows"])
    best = plan["rows"][0]
    assert (tmp_path / "plan.toml").read_text().startswith(f"# Written by python -m tfpar.plan: {best['layout']}, ")
    written = config.load(tmp_path / "plan.toml").strategy
    assert {key: getattr(written, key) for key in best["settings"]} == best["settings"]
    assert len(list((tmp_path / "runs" / ".plans").iterdir())) == 1
    _, _, module, *words = shlex.split(plan["command"])
    assert module == "tfpar.train"
    shared = [f"strategy.num_logical_cpus={len(logical_cpus)}"] * ("num_logical_cpus" in best["settings"])
    trained = call(*words, "--directory", "run", *command.settings(*shared))
    assert trained.code == 0, trained.err
    assert (tmp_path / "run" / "model.keras").exists()


@pytest.mark.multi_process
def test_two_workers_measure_layouts_together_and_the_chief_prints(tmp_path: Path) -> None:
    ended = run("tfpar.launch", "--num_workers", "2", "--", "-m", "tfpar.plan", *SET, *SHORT, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.removeprefix("[0] ") for line in ended.stdout.splitlines()]
    assert "devices    1 CPU on each of 2 workers" in lines
    assert any("MultiWorker(2)" in line and line[0].isdigit() for line in lines), ended.stdout
    assert sum("Take 1:" in line for line in lines) == 1
    assert not any(line.startswith("[1]") for line in lines)


@pytest.mark.extended
@pytest.mark.multi_process
def test_wrong_data_are_one_sentence(tmp_path: Path) -> None:
    returned = "tf.data.Dataset.from_tensor_slices((tf.zeros([0, 4]), tf.zeros([0], tf.int64)))"
    (tmp_path / "own.py").write_text(f"import tensorflow as tf\n\ndef rows():\n    return {returned}\n")
    settings = ["data.source=python", "data.function=own.rows", "data.num_classes=2"]
    ended = run("tfpar.plan", *[word for one in settings for word in ("--set", one)], folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "The dataset of own.rows holds no examples: choose another split" in " ".join(ended.stderr.split())
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
