"""The tabular trainer, and the configurations for stored data: each reaches the result in its header."""

import contextlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

import tfpar
from tests.support import command
from tests.support.command import ROOT, settings
from tfpar import config
from tfpar.data.sources.split import Column
from tfpar.trainers import recipe, samples
from tfpar.trainers.image_classification import ImageClassification
from tfpar.trainers.regression import Regression
from tfpar.trainers.tabular import Tabular, build_model, build_preprocessing

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples in it."""
    path = tmp_path_factory.mktemp("people")
    with contextlib.redirect_stdout(io.StringIO()):
        samples.main([str(path / "samples")])
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "overrides", "metric", "limit"),
    [
        ("image_folder", ["training.epochs=4"], "val_accuracy", 0.9),
        ("table", ["training.epochs=4"], "val_accuracy", 0.9),
        ("table_regression", ["training.epochs=6"], "val_mae", -60.0),
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
    if name != "table":
        return  # tests/data/test_stored.py audits all
    audited = call(*flags, "--audit", "2", *settings("data.shard_by=example"))
    assert audited.code == 0, audited
    assert "Right: all workers together read the examples of one worker alone" in audited.out


COLORS = ("red", "blue", "green")
STRATEGIES = {
    "single device": lambda: tfpar.SingleDevice(),
    "sharded weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2), 2),
}


def colors(folder: Path, **changes: Any) -> config.Run:
    """A run on two files whose label follows from a word, a code and a number with an empty cell."""
    for part in range(2):
        rows = [f"{row % 7 or ''},{COLORS[row % 3]},{row % 4 - 1},{COLORS[row % 3]} things" for row in range(20)]
        (folder / f"train-{part}.csv").write_text("\n".join(["a/b,linear,number,label", *rows]) + "\n")
    fields = {"directory": str(folder), "validation_split": None, "normalization": "standard", "missing_value": 3.5}
    categories = ("linear", "number", "label")
    return config.Run(
        trainer="tfpar.trainers.tabular.Tabular",
        data=config.Data(source="table", **{**fields, "category_columns": categories, **changes}),
        model=config.Model(name="mlp", num_blocks=1, width=8),
        optimizer=config.Optimizer(name="adam", learning_rate=0.05),
        training=config.Training(global_batch_size=10, precision="float64"),
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")  # Keras cannot name an input a/b
def test_the_saved_model_takes_raw_columns_and_has_the_weights_of_one_device(name: str, tmp_path: Path) -> None:
    run, weights = colors(tmp_path), []
    for build in (STRATEGIES["single device"], STRATEGIES[name]):
        trainer = Tabular(run, build())
        trainer.fit(trainer.train_data, epochs=2, verbose=0)
        trainer.save(tmp_path / "model.keras")
        saved = keras.models.load_model(tmp_path / "model.keras")
        weights.append(saved.get_weights())
        rows = {
            "a/b": tf.constant([1.0, np.nan, 3.5]),
            "linear": tf.constant(["red", "pink", "blue"]),
            "number": tf.constant(["0", "1", "9"]),
        }
        outputs = saved.predict(tf.data.Dataset.from_tensor_slices(rows).batch(2), verbose=0)
        expected = trainer.predict(np.asarray(trainer.preprocessing(rows)), batch_size=2, verbose=0)
        np.testing.assert_allclose(outputs, expected, rtol=1e-9)
        assert int(saved.optimizer.iterations) == 8
        assert len(saved.optimizer.variables) == len(trainer.model.optimizer.variables)
    for weight, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, weight, rtol=1e-9, atol=1e-12)
    recipe.set_precision("float32")


def test_a_filled_cell_is_worth_the_number_that_fills_it(tmp_path: Path) -> None:
    columns = [Column("x", "float32", 1.0, 4.0), Column("n", "int64", vocabulary=(-1, 5))]
    rows = {"x": np.array([[np.nan], [3.0]]), "n": np.array([[5], [7]])}
    encoded = np.asarray(build_preprocessing(columns, missing_value=1.0)(rows))
    assert encoded.tolist() == [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]


@pytest.mark.extended
def test_the_tabular_trainer_learns_from_words_alone(tmp_path: Path) -> None:
    """The label follows from the word, not from the number."""
    run = colors(tmp_path, columns=("linear",), category_columns=("linear", "label"), missing_value=None)
    losses = []
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(["CPU:0", "CPU:1"])):
        trainer = Tabular(run, strategy)
        assert trainer.class_names == ("blue things", "green things", "red things")
        history = trainer.fit(trainer.train_data, epochs=15, verbose=0).history
        assert history["accuracy"][-1] == 1.0
        losses.append(history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    recipe.set_precision("float32")


def test_a_trained_run_keeps_its_classes_and_predicts_raw_columns_without_tfpar(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = command.InProcess(capfd, monkeypatch, folder)
    flags = ["--config", "table", "--directory", str(tmp_path / "run"), *settings("callbacks.tensorboard=false")]
    flags += settings("training.epochs=3", "data.class_names=none", 'data.category_columns=["diagnosis"]')
    trained = call(*flags)
    assert trained.code == 0, trained
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["model"]["classes"] == ["benign", "malignant"]
    with zipfile.ZipFile(tmp_path / "run" / "model.keras") as archive:
        written = archive.read("config.json").decode()
    assert not re.search("tfpar|trainers", written), "plain Keras would have to know it"
    rows = pandas.read_csv(folder / "samples" / "breast_cancer" / "part-0.csv")
    classes = (rows.pop("diagnosis") == "malignant").astype(int)
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert (model.predict(dict(rows), verbose=0).argmax(1) == classes).mean() > 0.9
    assert model.evaluate(dict(rows), classes, verbose=0)[1] > 0.9


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
        (Regression, ["model.name=linear"], r"received inputs of shape \(\) from data.source = \"table\""),
        (ImageClassification, [], r"images \[height, width, channels\], received inputs of shape \(\)"),
    ],
)
def test_data_and_models_of_other_trainers_are_refused(
    trainer: type[tfpar.Trainer], overrides: list[str], message: str, folder: Path
) -> None:
    table = [
        *("data.source=table", f"data.directory={folder / 'samples' / 'breast_cancer'}", "data.train_split=part"),
        *("data.validation_split=none", "data.label_key=diagnosis", "data.class_names=['malignant', 'benign']"),
        "data.normalization=none",
    ]
    own = ["data.normalization=none"] if "data.source=python" in overrides else table
    with pytest.raises(ValueError, match=message):
        trainer(config.load(None, [*own, *overrides]), tfpar.SingleDevice())
