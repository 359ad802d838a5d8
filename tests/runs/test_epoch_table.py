"""The output of a training: a row per epoch, a progress bar on a terminal, and curves by step in TensorBoard."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.runs.directory import RunDirectory
from tfpar.runs.reporting import epoch_table, summary
from tfpar.runs.reporting.epoch_table import EpochTable
from tfpar.runs.reporting.tensorboard_steps import StepSummaries

pytestmark = pytest.mark.usefixtures("logical_cpus")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def train(callbacks: list[keras.callbacks.Callback], epochs: int = 2, **arguments: Any) -> tfpar.Trainer:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=2), "mse", metrics=["mae"])
        return model

    rows = np.ones((40, 2), "float32")
    trainer = tfpar.Trainer(build, tfpar.SingleDevice("CPU:0"))
    trainer.fit(rows, rows[:, 0], 10, epochs, verbose=0, callbacks=callbacks, steps_per_call=2, **arguments)
    return trainer


def screen(written: str) -> list[str]:
    """What stays on the terminal's lines."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


def test_a_terminal_keeps_one_line_an_epoch_and_sees_a_bar_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_table, "_SECONDS_BETWEEN", -1.0)
    rows = np.ones((10, 2), "float32")
    with contextlib.redirect_stdout(Terminal()) as terminal:
        table = EpochTable(True, "metrics.jsonl")
        train([tfpar.Throughput(), table], validation_data=(rows, rows[:, 0]))
    written = terminal.getvalue()
    header, first, second, rest = screen(written)
    assert header.split() == ["epoch", "loss", "mae", "val_loss", "val_mae", "examples/s"]
    assert re.fullmatch(r"  1/2( +0\.9\d{3}){4} +[\d,]+", first)
    assert second.split()[0] == "2/2"
    assert rest == ""
    assert max(map(len, re.split(r"[\r\n]", written))) < 60, "a full line would wrap"
    assert re.search(r"━{10}─{10} 2/4  loss 0\.\d+ *\r.*━{20} 4/4  loss .*\r.* validating", written, re.DOTALL), written


def test_metrics_that_do_not_fit_a_terminal_are_left_out_and_named_by_their_file() -> None:
    many = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update({f"a_metric_of_name_{index}": float(index) for index in range(9)})
    )
    with contextlib.redirect_stdout(Terminal()) as terminal:
        train([tfpar.Throughput(), many, EpochTable(False, "runs/x/metrics.jsonl")], epochs=1)
    note, header, row, _ = screen(terminal.getvalue())
    assert note == "More metrics than fit here are in runs/x/metrics.jsonl."
    assert header.split() == ["epoch", "loss", "mae", "a_metric_of_name_0", "examples/s"]
    assert len(header) == len(row) < 60


def test_figures_are_as_people_write_them_and_columns_keep_their_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = EpochTable(True, "metrics.jsonl")
    table.set_params({"epochs": 12, "steps": None})
    table.on_train_begin()
    logs = {"accuracy": 0.75, "loss": 1.23456e-5, "learning_rate": 2e-4, "several": np.ones(3)}
    table.on_epoch_begin(8)
    table.on_epoch_end(8, logs | {"examples_per_second": 9738.7, "step_milliseconds": 1.0, "data_wait_share": 0.5})
    table.on_epoch_end(9, logs | {"val_loss": 1234.5, "val_accuracy": 1.0})
    table.on_train_end()
    assert capsys.readouterr().out.splitlines() == [
        "epoch      loss  accuracy  learning_rate  val_loss  val_accuracy  examples/s",
        " 9/12  1.23e-05    0.7500         0.0002                               9,739",
        "10/12  1.23e-05    0.7500         0.0002     1,234             1            ",
    ]


def test_tensorboard_has_loss_and_speed_by_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    throughput = tfpar.Throughput()
    train([throughput, StepSummaries(tmp_path, throughput)], epochs=3)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    steps = {tag: [event.step for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert steps.pop("batch_loss") == steps.pop("batch_mae") == [2, 4, 6, 8, 10, 12]
    assert steps["batch_examples_per_second"] == [4, 6, 8, 10, 12], "the first call compiles"
    loss = float(tf.make_ndarray(events.Tensors("batch_loss")[0].tensor_proto))
    assert 0.9 < loss < 1.1


# The summary of a finished run: rounded figures, in 80 columns


RESULTS = {
    **{"epochs": 10, "steps": 240, "accuracy": 0.98532, "loss": 0.04321, "f1_score": [0.5, 0.25]},
    **{"learning_rate": 0.001, "val_loss": 0.072109, "val_accuracy": 0.98},
    **{"examples_per_second": 9738.7, "step_milliseconds": 6.5718, "data_wait_share": 2e-4},
    **{"flops_per_step": 2.56e10, "mfu": 0.413},
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return RunDirectory("runs/digits_on_a_machine_with_a_long_name")


def test_a_summary_says_metrics_one_speed_and_files_in_80_columns(directory: RunDirectory) -> None:
    directory.tensorboard.mkdir(parents=True)
    lines = summary.already_trained(directory, RESULTS).splitlines()
    assert max(map(len, lines)) <= 80, lines
    lines = summary.summary(directory, RESULTS).splitlines()
    assert lines[1] == "loss           0.0432, in validation 0.0721"
    for line in (
        "trained        10 epochs, 240 steps",
        "accuracy       0.9853, in validation 0.9800",
        "f1_score       0.5000, 0.2500",
        "learning_rate  0.001",
        "speed          9,739 examples/s, 6.572 ms a step, 0 % of it waiting for data",
        "FLOPs          25.6 GFLOP a step, MFU 41.3 %",
        f"model          {directory.model}, for",
    ):
        assert line in lines, lines
    assert max(map(len, lines)) <= 80, lines
    assert str(directory.tensorboard) in lines[-2]


def test_missing_results_of_a_run_are_not_named(directory: RunDirectory) -> None:
    text = summary.summary(directory, {"epochs": 1, "steps": 1, "loss": float("nan")})
    assert text.startswith("trained    1 epoch, 1 step\nloss       nan\nmodel")
    assert "tensorboard" not in text
    assert "speed" not in text
