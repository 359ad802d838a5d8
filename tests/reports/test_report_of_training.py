"""The report that the train command writes: of runs that are trained, interrupted, resumed, failed; never fatal."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import settings
from tests.support.recorded import Page, call_report
from tfpar.pipeline.analysis import timeline_plot
from tfpar.reports import events, recorded_run

PIPELINE = ("--config", "digits_pipeline", "--trace")
SMALL = ("--config", str(command.ROOT / "configs" / "regression_small.toml"), *settings("data.num_examples=2048"))


@pytest.fixture
def call(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logical_cpus: list[str]
) -> command.InProcess:
    monkeypatch.setenv("COLUMNS", "80")
    return command.InProcess(capfd, monkeypatch, tmp_path)


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in events.read(folder)[0]]


def words(folder: Path) -> str:
    read = Page((folder / "report.html").read_text())
    read.assert_loads_nothing()
    return " ".join(read.words.split())


def test_a_traced_pipeline_on_digits_has_every_section(
    call: command.InProcess, logical_cpus: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = f"data.directory={tmp_path_factory.getbasetemp() / 'tfds'}"
    asked = settings(data, "training.epochs=1", f"strategy.num_logical_cpus={len(logical_cpus)}")
    trained = call(*PIPELINE, *asked, "--directory", "run")
    assert (trained.code, trained.err) == (0, "")
    assert re.search(r"^report     run/report.html$", trained.out, re.MULTILINE), trained.out
    shown = words(tmp_path / "run")
    for part in ("trained to its end", "as planned", "as run", "cnn", "conv2d", "strategy.num_stages2", "the process"):
        assert part in shown, part
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["memory"]["process_peak_bytes"] > 100e6
    seconds = record["seconds"]
    assert 0 < seconds["validation"] < seconds["fit"]
    assert sum(seconds.values()) <= 2 * seconds["fit"]
    assert not (tmp_path / "run" / "report").exists(), "the page has its pictures"
    assert kinds(tmp_path / "run") == ["started", "trained"]
    again = call(*PIPELINE, *asked, "--directory", "run")
    assert "report     run/report.html" in again.out, "a trained run names it, too"


GRID = """
import keras, numpy as np, tensorflow as tf, tfpar

class Grid(tfpar.Trainer):
    reads = ("seed", "training.global_batch_size")
    validation_data, num_train_examples = None, 64

    def __init__(self, run, strategy):
        arrays = np.random.default_rng(0).normal(size=[64, 5]).astype("float32"), np.ones([64, 1], "float32")
        self.train_data = tf.data.Dataset.from_tensor_slices(arrays).batch(run.training.global_batch_size)
        super().__init__(build_model, strategy, run.seed)

def build_model():
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
"""
OF_GRID = settings(
    "trainer=grid.Grid", "training.global_batch_size=16", "training.epochs=1", "callbacks.tensorboard=false",
    "strategy.kind=hybrid", "strategy.num_replicas=2", "strategy.num_stages=2", "strategy.num_microbatches=2",
    'strategy.devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"]',
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("trace", [[], ["--trace"]], ids=["planned", "traced"])
def test_the_timeline_of_a_grid_has_the_stages_of_all_replicas(
    trace: list[str], call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grid.py").write_text(GRID)
    monkeypatch.delitem(sys.modules, "grid", raising=False)
    trained = call(*OF_GRID, *trace, "--directory", "run")
    assert trained.code == 0, trained
    record = recorded_run.read(tmp_path / "run").pipeline
    assert record is not None
    assert record.schedule.num_replicas == 2
    for timeline in (record.planned, record.measured) if trace else (record.planned,):
        assert timeline is not None
        assert sorted({span.device for span in timeline.spans}) == [0, 1, 2, 3], "two replicas of two stages"
        assert len(timeline.spans) == 16, "on each device 2 forward and 2 backward passes"
    drawn = timeline_plot.figure(record.planned, record.measured, record.schedule)
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawn.axes]
    assert rows == [[f"replica {one // 2}, device {one}" for one in range(4)]] * (1 + len(trace))
    shown = words(tmp_path / "run")
    assert "Timeline of a step" in shown
    assert ("as run" in shown) == bool(trace)


OF_REPLICAS = settings("strategy.kind=mirrored", 'strategy.devices=["CPU:0", "CPU:1"]', "training.epochs=1")


def test_a_profiled_run_links_what_tensorboard_opens(call: command.InProcess, tmp_path: Path) -> None:
    profiled = call(*SMALL, *OF_REPLICAS, *settings("training.epochs=4"), "--directory", "run", "--profile", "2")
    assert profiled.code == 0, profiled
    assert "profile    2 steps in run/tensorboard/plugins/profile" in profiled.out
    (file,) = (tmp_path / "run" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert file.stat().st_size > 1000
    read = Page((tmp_path / "run" / "report.html").read_text())
    assert "tensorboard/plugins/profile" in [link["href"] for link in read.of("a")]
    assert "tensorboard --logdir run/tensorboard" in read.words
    assert call_report(str(tmp_path / "run"), f"--output={tmp_path / 'elsewhere.html'}") == 0
    read = Page((tmp_path / "elsewhere.html").read_text())
    assert "run/tensorboard/plugins/profile" in [link["href"] for link in read.of("a")]


def test_a_trace_without_a_pipeline_is_refused(call: command.InProcess, tmp_path: Path) -> None:
    refused = call(*SMALL, *OF_REPLICAS, "--directory", "run", "--trace")
    assert refused.code == 1, refused
    assert "--trace times the actions of a pipeline, received Mirrored" in " ".join(refused.err.split())
    assert "record its steps with --profile 5" in " ".join(refused.err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.extended
def test_an_interrupted_run_is_reported_and_so_is_its_resumption(call: command.InProcess, tmp_path: Path) -> None:
    long = call(*SMALL, *settings("training.epochs=2"), "--directory", "run")
    assert long.code == 0, long
    resumed = call(*SMALL, *settings("training.epochs=3"), "--directory", "run")
    assert resumed.code == 0, resumed
    assert kinds(tmp_path / "run") == ["started", "trained", "resumed", "trained"]
    assert "training.epochs = 3 instead of 2" in words(tmp_path / "run")


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_stopped_and_a_killed_run_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL, *settings("training.epochs=100000", "training.checkpoint_seconds=0"), "--directory", "run"]
    for end in (signal.SIGTERM, signal.SIGKILL):
        with command.started(arguments, tmp_path, tmp_path) as running:
            number = len(kinds(folder)) if folder.exists() else 0
            running.wait_until(lambda number=number: len(kinds(folder)) > number)
            before = (folder / "metrics.jsonl").stat().st_mtime_ns if (folder / "metrics.jsonl").exists() else 0
            running.wait_until(
                lambda before=before: (
                    (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_mtime_ns > before
                )
            )
            running.send(end)
            running.finish()
        if end == signal.SIGTERM:
            assert kinds(folder) == ["started", "interrupted"]
            assert "interrupted, with a checkpoint to resume from" in words(folder)
    assert kinds(folder) == ["started", "interrupted", "resumed"]
    assert call_report(str(folder)) == 0
    assert "its process was killed" in words(folder)


def test_a_loss_that_is_not_finite_is_a_failure_with_a_report(call: command.InProcess, tmp_path: Path) -> None:
    failed = call(*SMALL, *settings("optimizer.name=sgd", "optimizer.learning_rate=1e30"), "--directory", "run")
    assert failed.code == 1, failed
    assert kinds(tmp_path / "run")[-2:] == ["nonfinite_loss", "failed"]
    assert "FloatingPointError" in words(tmp_path / "run")


def test_a_run_that_is_refused_leaves_nothing(call: command.InProcess, tmp_path: Path) -> None:
    refused = call(
        *SMALL, *settings("callbacks.early_stopping_patience=1", "callbacks.monitor=x"), "--directory", "run"
    )
    assert refused.code == 1, refused
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_made_is_one_line_and_the_run_is_trained(
    call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no font")

    with monkeypatch.context() as patch:
        patch.setattr("tfpar.reports.pictures.metrics", fail)
        trained = call(*SMALL, *settings("training.epochs=1"), "--directory", "run")
    assert (trained.code, trained.err) == (0, "")
    assert re.findall("^report.*", trained.out, re.MULTILINE) == ["report     none: RuntimeError: no font"]
    assert (tmp_path / "run" / "model.keras").exists()


def test_a_run_without_a_report_is_recorded_all_the_same(call: command.InProcess, tmp_path: Path) -> None:
    trained = call(*SMALL, *settings("training.epochs=1", "callbacks.report=false"), "--directory", "run")
    assert trained.code == 0, trained
    assert "report" not in trained.out
    assert "report.html" not in os.listdir(tmp_path / "run")
    assert call_report(str(tmp_path / "run")) == 0
    assert "trained to its end" in words(tmp_path / "run")
    began = time.perf_counter()
    assert call_report(str(tmp_path / "run")) == 0
    assert time.perf_counter() - began < 30, "a report of one epoch hangs"
