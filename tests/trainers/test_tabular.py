"""The tabular trainer, and the configurations for stored data: each reaches the result in its header."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

import tfpar
from tests.support import command
from tests.support.command import ROOT, settings
from tfpar import config
from tfpar.trainers import recipe, samples
from tfpar.trainers.image_classification import ImageClassification
from tfpar.trainers.regression import Regression
from tfpar.trainers.tabular import Tabular, build_model

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples in it."""
    path = tmp_path_factory.mktemp("people")
    with contextlib.redirect_stdout(io.StringIO()):
        samples.main([str(path / "samples")])
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "overrides", "metric", "limit"),
    [
        ("image_folder", ["training.epochs=4"], "val_accuracy", 0.9),
        ("csv", ["training.epochs=4"], "val_accuracy", 0.9),
        ("parquet", ["training.epochs=6"], "val_mae", -60.0),
        ("python", ["training.epochs=4"], "val_accuracy", 0.9),
    ],
)
def test_the_configurations_train_the_samples(
    name: str,
    overrides: list[str],
    metric: str,
    limit: float,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = command.InProcess(capfd, monkeypatch, folder)
    flags = ["--config", str(ROOT / "configs" / f"{name}.toml"), *settings("callbacks.tensorboard=false", *overrides)]
    trained = call(*flags)
    assert trained.code == 0, trained
    (last, *_) = reversed(command.metrics(folder / "runs" / name))
    assert last[metric] > limit if limit > 0 else last[metric] < -limit, last
    if name != "csv":
        return  # tests/data/test_stored.py audits all
    audited = call(*flags, "--audit", "2", *settings("data.shard_by=example"))
    assert audited.code == 0, audited
    assert "Right: all workers together read the examples of one worker alone" in audited.out


@pytest.mark.extended
def test_a_run_on_csv_files_resumes_in_the_middle_of_an_epoch(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two epochs at once, and stopped after the third step of the second: the same weights."""
    flags = [*("--config", str(ROOT / "configs" / "csv.toml")), *settings("callbacks.tensorboard=false")]
    flags += settings("training.epochs=2", "training.steps_per_call=1", "training.precision=float64")
    flags += settings(f"data.directory={folder / 'samples' / 'breast_cancer'}", "training.checkpoint_seconds=0")
    (tmp_path / "stopping.py").write_text(
        "from tfpar.trainers.tabular import Tabular\n"
        "import keras\n\n"
        "class Stopping(Tabular):\n"
        "    def fit(self, *arguments, callbacks=(), **more):\n"
        "        stop = keras.callbacks.LambdaCallback(on_train_batch_end=self.count)\n"
        "        return super().fit(*arguments, callbacks=[*callbacks, stop], **more)\n\n"
        "    def count(self, batch, logs):\n"
        "        if int(self.model.optimizer.iterations.numpy()) == 18:\n"
        "            self.interrupt()\n"
    )
    call = command.InProcess(capfd, monkeypatch, tmp_path)
    assert call(*flags, "--directory", "whole").code == 0
    stopped = call(*flags, "--directory", "stopped", *settings("trainer=stopping.Stopping"))
    assert stopped.code == 130, stopped
    assert "Stopped after step 18" in stopped.out
    again = call(*flags, "--directory", "stopped", *settings("trainer=stopping.Stopping"))
    assert again.code == 0, again
    assert "Resuming after epoch 1 and" in again.out
    command.assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.extended
def test_two_replicas_train_the_weights_of_one_device_on_parquet_files(folder: Path) -> None:
    directory = f"data.directory={folder / 'samples' / 'diabetes'}"
    run = config.load(ROOT / "configs" / "parquet.toml", [directory, "training.precision=float64"])
    weights = []
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(["CPU:0", "CPU:1"])):
        trainer = Tabular(run, strategy)
        trainer.fit(trainer.train_data, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-9)
    recipe.set_precision("float32")


def test_the_network_has_the_layers_that_are_asked_for() -> None:
    overrides = ["model.name=mlp", "model.num_blocks=2", "model.width=5", "model.dropout=0.1", "model.l2=0.5"]
    model = build_model(config.load(None, overrides), (3,), num_classes=4)
    names = [layer.name.rstrip("_0123456789") for layer in model.layers]
    assert names == ["row", "hidden", "hidden", "dropout", "logits"]
    assert (model.input_shape, model.output_shape) == ((None, 3), (None, 4))
    assert len(model.losses) == 3
    linear = build_model(config.load(None, ["model.name=linear"]), (3,), num_classes=None)
    assert [layer.name for layer in linear.layers] == ["row", "number"]
    assert linear.output_shape == (None, 1)


@pytest.mark.parametrize(
    ("trainer", "overrides", "message"),
    [
        (Tabular, ["model.name=cnn"], 'builds model.name = "mlp" or "linear", received "cnn"'),
        (
            Tabular,
            ["model.name=linear", "model.width=3"],
            'model.width = 3 is a setting of "mlp", received model.name = "linear"',
        ),
        (
            Tabular,
            ["model.name=mlp", "data.source=python", "data.function=tfpar.trainers.samples.digits"],
            r"\(8, 8, 1\)",
        ),
        (Regression, ["model.name=linear"], "Regression predicts numbers, received labels of 2 classes"),
        (ImageClassification, [], r"images \[height, width, channels\], received inputs of shape \(30,\)"),
    ],
)
def test_data_and_models_of_other_trainers_are_refused(
    trainer: type[tfpar.Trainer], overrides: list[str], message: str, folder: Path
) -> None:
    table = [
        *("data.source=csv", f"data.directory={folder / 'samples' / 'breast_cancer'}", "data.train_split=part"),
        *("data.validation_split=none", "data.label_key=diagnosis", "data.class_names=['malignant', 'benign']"),
        "data.normalization=none",
    ]
    own = ["data.normalization=none"] if "data.source=python" in overrides else table
    with pytest.raises(ValueError, match=message):
        trainer(config.load(None, [*own, *overrides]), tfpar.SingleDevice())
