"""The best epoch of a run: early stopping says what it did, and `callbacks.save_best` keeps the model."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.support import command
from tests.support.command import metrics, settings
from tfpar.loops.callback_list import wants_single_batches, writes_files
from tfpar.reports import events
from tfpar.runs.callback_settings import BestModel

# Two steps an epoch; from the fifth epoch on the weights go away from the minimum again.
OWN = """
import keras, numpy as np, tensorflow as tf, tfpar

class Turns(tfpar.Trainer):
    def __init__(self, run, strategy):
        rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        self.train_data = tf.data.Dataset.from_tensor_slices((rows, rows.sum(1))).batch(32)
        self.validation_data, self.num_train_examples = self.train_data, 64
        super().__init__(self.build_model, strategy, run.seed)

    def build_model(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([7], [0.05, -0.05])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae", keras.metrics.MeanMetricWrapper(err, "err")])
        return model

def err(targets, outputs):
    return tf.abs(targets - outputs[:, 0])
"""
FLAGS = ["--directory", "run", *settings("trainer=own.Turns")]
STOPS = settings("callbacks.early_stopping_patience=2")


def epochs(number: int) -> list[str]:
    return settings(f"training.epochs={number}")


def results(folder: Path) -> dict[str, float]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.few(1)
@pytest.mark.parametrize("interrupted", [False, True], ids=["at once", "resumed"])
def test_an_early_stop_is_said_and_the_results_are_of_the_restored_epoch(
    call: command.InProcess, tmp_path: Path, interrupted: bool
) -> None:
    if interrupted:
        assert call(*FLAGS, *STOPS, *epochs(5)).code == 0
    outcome = call(*FLAGS, *STOPS, *epochs(9))
    assert outcome.code == 0, outcome
    said = "Stopped after epoch 6: val_loss has not improved for 2 epochs. The model has the weights of epoch 4."
    assert said in " ".join(outcome.out.split())
    assert "trained    6 epochs, 12 steps; the weights are those of epoch 4\n" in outcome.out
    best, last = metrics(tmp_path / "run")[3], metrics(tmp_path / "run")[-1]
    assert best["val_loss"] < last["val_loss"], "this test reads the right epoch"
    found = results(tmp_path / "run")
    assert (found["epochs"], found["weights_of_epoch"]) == (6, 4)
    for name in ("loss", "mae", "val_loss", "val_mae"):
        assert found[name] == pytest.approx(best[name], rel=1e-5), name
    (stop,) = [event for event in events.read(tmp_path / "run")[0] if event.kind == events.STOPPED_EARLY]
    assert (stop.step, stop.detail) == (12, said)
    page = (tmp_path / "run" / "report.html").read_text()
    assert said in page
    assert "the weights are those of epoch 4" in page
    assert "the weights are those of epoch 4" in call(*FLAGS, *STOPS, *epochs(9)).out, "said again of a finished run"


def test_the_model_of_the_best_epoch_is_kept_also_by_a_run_that_resumes(
    call: command.InProcess, tmp_path: Path
) -> None:
    assert call(*FLAGS, *epochs(4), "--directory", "best").code == 0
    best = settings("callbacks.save_best=val_loss")
    outcome = call(*FLAGS, *best, *epochs(5))
    assert outcome.code == 0, outcome
    assert "best       run/best.keras\n" in outcome.out
    kept = (tmp_path / "run" / "best.keras").read_bytes()
    assert call(*FLAGS, *best, *epochs(7)).code == 0
    assert (tmp_path / "run" / "best.keras").read_bytes() == kept, "epochs 6 and 7 are worse than 4"
    models = [
        keras.models.load_model(tmp_path / file, compile=False) for file in ("run/best.keras", "best/model.keras")
    ]
    for array, expected in zip(*[model.get_weights() for model in models], strict=True):
        np.testing.assert_array_equal(array, expected)
    assert not [path for path in (tmp_path / "run").iterdir() if "unfinished" in path.name]


def test_a_higher_accuracy_is_better(
    call: command.InProcess, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = f"data.directory={tmp_path_factory.getbasetemp() / 'tfds'}"
    flags = settings(data, "training.global_batch_size=300", "callbacks.save_best=val_accuracy")
    assert call("--config", "digits", "--directory", "run", *flags, *epochs(2)).code == 0
    first, second = (line["val_accuracy"] for line in metrics(tmp_path / "run"))
    assert second > first, "else this test does not tell the directions apart"
    models = [keras.models.load_model(tmp_path / "run" / f"{name}.keras", compile=False) for name in ("best", "model")]
    for array, expected in zip(*[model.get_weights() for model in models], strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("val_mea", 'callbacks.save_best = "val_mea" is no metric of this model. There are: loss, val_loss, mae,'),
        ("val_err", 'set callbacks.monitor_mode = "min" or "max" with callbacks.monitor = "val_err".'),
    ],
)
def test_a_log_that_cannot_be_the_best_is_refused(call: command.InProcess, log: str, sentence: str) -> None:
    refused = call(*FLAGS, *settings(f"callbacks.save_best={log}"), *epochs(1))
    assert refused.code == 1
    assert sentence in refused.err, refused.err


def test_the_chief_alone_keeps_the_best_model_after_whole_epochs() -> None:
    callback = BestModel("{run}/best.keras", "val_loss")
    assert writes_files(callback)
    assert not wants_single_batches(callback)
