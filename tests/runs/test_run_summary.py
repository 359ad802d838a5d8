"""The summary of a finished run: rounded figures, in 80 columns."""

from pathlib import Path

import pytest

from tfpar.runs import summary
from tfpar.runs.directory import RunDirectory

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
