"""Bad input to the command: one clear sentence, a code that is not zero, and nothing lost or overwritten."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import command
from tests.support.command import Outcome, contents, settings
from tests.support.extent import sampled
from tfpar import config
from tfpar.engines.stages.stage_engine import StageEngine
from tfpar.runs.reporting.epoch_table import EpochTable

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

REGRESSION = [
    *("--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"),
    *settings("data.num_examples=2048", "training.global_batch_size=64"),
]
RECORDS = """
data.source = "tfrecord"
data.directory = "records"
data.num_classes = 4
training.epochs = 1
training.global_batch_size = 16

[data.features]
image = {dtype = "float32", shape = [8, 8, 1]}
label = {dtype = "int64"}
"""
OWN = """
import keras, tensorflow as tf, tfpar
from tfpar.loops.agreement import failure_reports

class Good(tfpar.Trainer):
    shape = (3,)

    def __init__(self, run, strategy):
        rows = tf.data.Dataset.from_tensor_slices((tf.ones([8, 3]), tf.ones([8, 1])))
        self.train_data = rows.batch(run.training.global_batch_size)
        self.validation_data, self.num_train_examples = None, 8
        super().__init__(self.build, strategy, run.seed)

    def build(self):
        model = keras.Sequential([keras.Input(self.shape), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

class Unbuilt(Good):
    def build(self):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

class Uncompiled(Good):
    def build(self):
        return keras.Sequential([keras.Input(self.shape), keras.layers.Dense(1)])

class Nothing(Good):
    def build(self):
        pass

class Mismatch(Good):
    shape = (4,)

class NoData(tfpar.Trainer):
    def __init__(self, run, strategy):
        super().__init__(lambda: Good.build(Good), strategy, run.seed)

class NoConstructor(Good):
    def __init__(self, run, strategy):
        self.train_data = self.validation_data = self.num_train_examples = None

class Empty(Good):
    def __init__(self, run, strategy):
        super().__init__(run, strategy)
        self.train_data = self.train_data.take(0)

class DiskFull(Good):
    def fit(self, *arguments, **more):
        message = "{{function_node __wrapped__CreateSummaryFileWriter}} run/events.v2; No space left on device"
        raise tf.errors.ResourceExhaustedError(None, None, message)

class TooLarge(Good):
    @failure_reports.reported
    def fit(self, *arguments, **more):
        message = "OOM when allocating tensor with shape[8,4] and type float on /job:localhost/device:CPU:0 by [[x]]"
        raise tf.errors.ResourceExhaustedError(None, None, message)

class Unforeseen(Good):
    def fit(self, *arguments, **more):
        raise tf.errors.InternalError(None, None, "Graph execution error:\\n\\nDetected at node x\\nthe true reason")
"""


@pytest.fixture(autouse=True)
def announced_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say when an epoch begins, as the table of epochs does only at its end."""
    begin = EpochTable.on_epoch_begin

    def announce(table: EpochTable, epoch: int, logs: dict[str, Any] | None = None) -> None:
        print(f"Epoch {epoch + 1} begins")
        begin(table, epoch, logs)

    monkeypatch.setattr(EpochTable, "on_epoch_begin", announce)


@pytest.fixture
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of one epoch of the default run, with data in a folder of the tests."""
    data = tmp_path_factory.getbasetemp() / "tfds"
    return ["--directory", "run", *settings(f"data.directory={data}", "training.epochs=1")]


@pytest.fixture
def records(call: command.InProcess, tmp_path: Path) -> Path:
    """A folder of TFRecord files with 40 training and 4 validation examples, and its configuration `records.toml`."""
    (tmp_path / "records.toml").write_text(RECORDS)
    write(tmp_path / "records" / "train-0", [i % 4 for i in range(40)])
    write(tmp_path / "records" / "test-0", [0, 1, 2, 3])
    return tmp_path / "records"


def write(path: Path, labels: list[int]) -> None:
    """One TFRecord file of images that are as bright as their labels are high."""
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for label in labels:
            features = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=[label / 10] * 64)),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def assert_one_sentence(outcome: Outcome, *parts: str, before_training: bool = True) -> None:
    """One line on standard error, in our words, that says all the parts; nothing was trained if so asked."""
    assert outcome.code == 1, outcome
    assert outcome.err.startswith("error: "), outcome.err
    assert outcome.err.count("\n") == 1, f"one line: {outcome.err}"
    for part in parts:
        assert part in outcome.err, f"{part!r} is not in {outcome.err}"
    assert not re.search(r"Traceback|\{\{|Graph execution error|object is not|unsupported operand", outcome.err)
    if before_training:
        assert "Epoch 1" not in outcome.out, "all that can be checked is checked before the first step"


def assert_finite(checkpoints: Path) -> None:
    """Every checkpoint in the folder holds finite weights."""
    for path in checkpoints.glob("step-*.npz"):
        with np.load(path) as file:
            weights = [file[key] for key in file.files if key.startswith("weights/")]
        assert weights, "the names of weights in a checkpoint have changed"
        assert all(np.isfinite(array).all() for array in weights), path.name


# Configuration


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (settings("training.epoch=2"), ["training.epoch = 2 is not a known setting", "did you mean training.epochs"]),
        (settings("traning.epochs=2"), ["did you mean training?"]),
        (settings("training.epochs=ten"), ['training.epochs = "ten" must be an integer']),
        (["--config", "nowhere.toml"], ["nowhere.toml", "must exist"]),
        (["surplus"], ["'surplus'", "--help"]),
        (["--config", "digit"], ["'digit'", "Did you mean digits?"]),
        (
            settings("strategy.kind=mirrored", "strategy.num_logical_cpus=4", "training.global_batch_size=2"),
            ["training.global_batch_size = 2", "at least 4"],
        ),
    ],
)
def test_a_configuration_is_refused_without_a_trace_on_disk(
    call: command.InProcess, tmp_path: Path, flags: list[str], parts: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert_one_sentence(call(*flags), *parts)
    assert sorted(tmp_path.rglob("*")) == before


def test_each_of_several_problems_is_an_error_line(call: command.InProcess) -> None:
    outcome = call(*settings("training.epoch=2", "data.nme=x"))
    assert outcome.code == 1
    lines = outcome.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines), lines


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--directory", ""], ["--directory must name a folder, received an empty name"]),
        (["--directory", "x" * 300], ["--directory must be a path that the system can have", "File name too long"]),
        (["--directory", "run", "--audit", "0"], ["--audit must be at least 1, received 0"]),
        (["--directory", "run", "--audit", "-1"], ["--audit must be at least 1, received -1"]),
        (["--directory", "run", "--audit", "100000"], ["--audit must be at most 4,096, received 100000"]),
        (["--config", "x" * 300], ["A configuration is a TOML file or one of"]),
        (["--config", "x" * 300 + ".toml"], ["The configuration file", "must exist"]),
        (
            ["--directory", "run", *settings("data.source=table", f"data.directory={'x' * 300}", "data.num_classes=2")],
            ["data.directory must be a folder of table files"],
        ),
        (
            ["--directory", "run", *settings("data.source=table", "data.directory=~nobody-has-this-name/x")],
            ["data.directory must be a folder of table files"],
        ),
        (
            ["--directory", "run", *settings("data.source=table", "data.directory=.", "data.train_split=/etc/*")],
            ["A pattern of files must be relative to"],
        ),
        (
            ["--directory", "run", *settings("data.source=table", "data.directory=.", f"data.train_split={'x' * 300}")],
            ["holds no table files of split"],
        ),
    ],
    ids=lambda value: f"{value!r:.50}",
)
def test_a_name_that_cannot_be_one_is_blamed_on_its_flag_or_key(
    call: command.InProcess, flags: list[str], parts: list[str]
) -> None:
    trainer = (
        settings("trainer=tfpar.trainers.tabular.Tabular", "model.name=mlp") if "data.source=table" in flags else []
    )
    assert_one_sentence(call(*flags, *trainer), *parts)


def test_a_file_in_the_place_of_the_tensorboard_folder_is_refused(call: command.InProcess, tmp_path: Path) -> None:
    assert call(*REGRESSION, *settings("callbacks.tensorboard=false")).code == 0
    (tmp_path / "run" / "tensorboard").touch()
    outcome = call(*REGRESSION, *settings("training.epochs=99", "callbacks.tensorboard=true"))
    assert_one_sentence(outcome, "run/tensorboard must be a folder")


# Devices


def test_a_batch_smaller_than_the_devices_found_is_refused(call: command.InProcess, digits: list[str]) -> None:
    outcome = call(*digits, *settings("strategy.kind=mirrored", "training.global_batch_size=2"))
    assert_one_sentence(outcome, "global_batch_size", "2", "4")


def test_a_batch_smaller_than_the_micro_batches_of_all_workers_is_refused(
    call: command.InProcess, digits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageEngine, "batch_parts", (8, "micro-batch"))  # as over two workers
    grid = settings("strategy.kind=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=4")
    outcome = call(*digits, *grid, *settings("training.global_batch_size=6"))
    assert_one_sentence(outcome, "global_batch_size = 6 is less than the number of micro-batches of all", "at least 8")


def test_a_device_that_does_not_exist_is_refused_with_those_that_do(call: command.InProcess) -> None:
    assert_one_sentence(call(*REGRESSION, *settings('strategy.devices=["GPU:0"]')), "'GPU:0'", "CPU:0")


# Data


def test_an_unknown_data_set_is_refused_with_names_like_it(call: command.InProcess, digits: list[str]) -> None:
    assert_one_sentence(call(*digits, *settings("data.name=mnst")), '"mnst"', "did you mean mnist")


def test_without_a_network_a_data_set_that_must_be_downloaded_is_refused(
    call: command.InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_address(*arguments: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    outcome = call(*settings("data.name=mnist", f"data.directory={tmp_path / 'empty'}"))
    assert_one_sentence(outcome, '"mnist"', "could not be downloaded", "network", "data.directory")


@pytest.mark.parametrize(
    ("split", "part"), [("nowhere", "It has: train, test"), ("train[:0]", "holds no examples")], ids=str
)
def test_a_split_that_is_not_there_or_empty_is_refused(
    call: command.InProcess, digits: list[str], split: str, part: str
) -> None:
    assert_one_sentence(call(*digits, *settings(f"data.train_split={split}")), split, part)


def test_good_records_train(call: command.InProcess, records: Path) -> None:
    outcome = call("--config", "records.toml")
    assert outcome.code == 0, "what the tests below damage is good"
    assert "Epoch 1 begins" in outcome.out, "so the tests see when training begins"


def test_a_plan_of_unknown_length_is_printed_as_such(call: command.InProcess, records: Path) -> None:
    assert "as many steps" not in call("--config", "records.toml").out


@pytest.mark.parametrize(
    ("split", "part"), [("train", "after 39 whole records"), ("test", "after 3 whole records")], ids=str
)
def test_a_corrupt_record_is_named_by_its_file(
    call: command.InProcess, records: Path, split: str, part: str
) -> None:  # fmt: skip
    victim = records / f"{split}-0"
    victim.write_bytes(victim.read_bytes()[:-30])
    assert_one_sentence(call("--config", "records.toml"), f"records/{split}-0", part, before_training=False)


@pytest.mark.parametrize(("content", "part"), [(b"", "holds no examples"), (b"text " * 9, "no TFRecord file")], ids=str)
def test_a_file_that_holds_no_records_is_refused(
    call: command.InProcess, records: Path, content: bytes, part: str
) -> None:  # fmt: skip
    (records / "train-0").write_bytes(content)
    assert_one_sentence(call("--config", "records.toml"), part)


@pytest.mark.few(1)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("label", [4, -1])
def test_a_label_out_of_range_is_named(call: command.InProcess, records: Path, split: str, label: int) -> None:
    write(records / f"{split}-1", [0] * 20 + [label])
    outcome = call("--config", "records.toml")
    assert_one_sentence(outcome, f"the label {label}", "0 to 3", "data.num_classes", before_training=False)


# Models


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.name=resnet50"], ['"cnn"', "Did you mean ResNet50?", "https://keras.io/api/applications lists them"]),
        (["model.name=MobileNetV2"], ["MobileNetV2", "(8, 8, 1)", "at least 32x32", 'model.name="cnn"']),
        (["optimizer.name=adamant"], ["optimizer.name", "'adamant'", "Did you mean adam"]),
        (["optimizer.name=multioptimizer"], ["optimizer.name", "'multioptimizer'"]),
        (["optimizer.name=Optimizer"], ["optimizer.name must be that of a Keras optimizer, received 'Optimizer'"]),
        (["model.name=__class__"], ["such as ResNet50, received '__class__'"]),
        ([f"model.name={'x' * 10_000}"], ["such as ResNet50, received 'xxx"]),
        (["optimizer.settings.momentum=0.9"], ["optimizer.settings", "'momentum'"]),
        (["optimizer.settings.beta_1=high"], ["optimizer.settings", "beta_1"]),
        (["callbacks.monitor=nothing", "callbacks.early_stopping_patience=1"], ["callbacks.monitor", "val_loss"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_a_setting_that_keras_does_not_know_is_refused_before_training(
    call: command.InProcess, digits: list[str], tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    outcome = call(*digits, *settings("training.epochs=2", *overrides))
    assert_one_sentence(outcome, *parts)
    assert not (tmp_path / "run").exists(), "nothing was trained, so there is no run"


def test_a_metric_of_the_model_can_be_watched(call: command.InProcess) -> None:
    watched = ["callbacks.early_stopping_patience=1", "callbacks.reduce_learning_rate_patience=1"]
    for monitor in sampled(("loss", "val_mae"), of_ci=["val_mae"]):
        flags = settings(*watched, f"callbacks.monitor={monitor}")
        assert call(*REGRESSION, *flags, "--directory", monitor).code == 0


def test_the_regression_refuses_other_models_and_data(call: command.InProcess, digits: list[str]) -> None:
    trainer = settings("trainer=tfpar.trainers.regression.Regression")
    assert_one_sentence(call(*digits, *trainer), '"linear"', "'cnn'")
    outcome = call(*digits, *trainer, *settings("model.name=linear"), "--directory", "other")
    assert_one_sentence(outcome, "(8, 8, 1)")


def test_the_classification_refuses_data_without_classes_or_without_images(
    call: command.InProcess, records: Path
) -> None:
    trainer = settings("trainer=tfpar.trainers.image_classification.ImageClassification", "model.name=cnn")
    outcome = call(*REGRESSION, *trainer)
    assert_one_sentence(outcome, "classes", "generated")
    assert "digits" not in outcome.err, "no dataset of that name is read"
    assert "data.num_classes" not in outcome.err, "it has no use with generated data"
    flat = settings("data.features.image.shape=[64]")
    outcome = call("--config", "records.toml", *flat)
    assert_one_sentence(outcome, "64", "height, width, channels")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nowhere.Trainer", ["'nowhere.Trainer'", "import path"]),
        ("own.Nothing_of_the_kind", ["'own.Nothing_of_the_kind'"]),
        ("own.Mismach", ["'own.Mismach'", "Did you mean Mismatch?"]),
        ("pathlib.Path", ["'pathlib.Path'", "tfpar.Trainer"]),
        ("tfpar.Trainer", ["'tfpar.Trainer'", "tfpar.trainers.image_classification.ImageClassification"]),
        ("own.Uncompiled", ["not compiled", "model.compile"]),
        ("own.Nothing", ["NoneType", "return model"]),
        ("own.Mismatch", ["(None, 4)", "(None, 3)"]),
        ("own.Empty", ["empty"]),
        ("own.NoData", ["train_data"]),
        ("own.NoConstructor", ["own.NoConstructor", "super().__init__(build_model, strategy, run.seed)."]),
        ("nowhere.Good", ["No module named 'nowhere'", "in the current folder", "on PYTHONPATH, not beside"]),
        ("importing.Good", ["No module named 'absent'", "'importing' imports it"]),
    ],
)
def test_a_trainer_of_the_users_own_is_checked(
    call: command.InProcess, tmp_path: Path, name: str, parts: list[str]
) -> None:
    (tmp_path / "importing.py").write_text("import absent")
    assert_one_sentence(call("--directory", "run", *settings(f"trainer={name}", "training.epochs=2")), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Good", "Unbuilt"])
def test_a_trainer_of_the_users_own_trains(call: command.InProcess, tmp_path: Path, name: str) -> None:
    outcome = call("--directory", "run", *settings(f"trainer=own.{name}", "training.epochs=2"))
    assert outcome.code == 0, outcome
    assert (tmp_path / "run" / "model.keras").exists()


# The loss


def test_a_loss_that_explodes_stops_the_run_names_the_step_and_keeps_good_checkpoints(
    call: command.InProcess, tmp_path: Path
) -> None:
    flags = settings("optimizer.learning_rate=3.0", "training.checkpoint_seconds=0", "training.steps_per_call=1")
    exploded = call(*REGRESSION, *flags)
    assert_one_sentence(exploded, "must stay finite", "learning rate", before_training=False)
    step = int(re.search(r"at step (\d+)", exploded.err)[1])  # type: ignore[index]
    assert 2 < step < 32
    checkpoints = tmp_path / "run" / "checkpoints"
    names = [f"step-{before:08d}.npz" for before in range(step - 3, step)]
    assert sorted(path.name for path in checkpoints.iterdir()) == names, "the steps before it, and none after"
    assert_finite(checkpoints)
    before = contents(checkpoints)
    again = call(*REGRESSION, *flags)
    assert f"at step {step} " in again.err, "it resumes behind the last good step and stops at the same one"
    assert contents(checkpoints) == before
    assert not (tmp_path / "run" / "model.keras").exists()


def test_a_loss_that_explodes_in_one_long_call_names_the_same_step(call: command.InProcess, tmp_path: Path) -> None:
    flags = settings("optimizer.learning_rate=3.0")
    steps = []
    for steps_per_call in (1, 1000):
        outcome = call(*REGRESSION, *flags, *settings(f"training.steps_per_call={steps_per_call}"))
        steps.append(re.search(r"at step (\d+)", outcome.err))
        shutil.rmtree(tmp_path / "run")
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0][1] == steps[1][1]


def test_a_run_may_continue_after_a_loss_that_is_not_finite(call: command.InProcess, tmp_path: Path) -> None:
    outcome = call(*REGRESSION, *settings("optimizer.learning_rate=3.0", "training.nonfinite_loss=continue"))
    assert outcome.code == 0, outcome
    assert (tmp_path / "run" / "model.keras").exists()
    assert not np.isfinite(json.loads((tmp_path / "run" / "results.json").read_text())["loss"])


@pytest.mark.parametrize("learning_rate", ["1e38", "1e39"], ids=["the loss overflows", "the weights overflow"])
def test_a_model_spoilt_by_the_last_step_is_not_saved_as_trained(
    call: command.InProcess, tmp_path: Path, learning_rate: str
) -> None:
    """The loss of a step is that of the weights before it, so here only the validation is not finite."""
    flags = settings("data.num_examples=64", f"optimizer.learning_rate={learning_rate}")
    outcome = call(*REGRESSION, *flags, *settings("training.checkpoint_seconds=0"))
    assert_finite(tmp_path / "run" / "checkpoints")
    assert_one_sentence(outcome, "val_loss", "finite", before_training=False)
    assert not (tmp_path / "run" / "model.keras").exists()


# The run directory


def test_a_mistake_does_not_block_its_own_correction(call: command.InProcess, digits: list[str]) -> None:
    assert call(*digits, *settings("data.name=mnst")).code == 1
    corrected = call(*digits)
    assert corrected.code == 0, corrected


def test_another_runs_directory_is_refused_and_stays_as_it_is(call: command.InProcess, tmp_path: Path) -> None:
    assert call(*REGRESSION).code == 0
    before = contents(tmp_path / "run")
    outcome = call(*REGRESSION, *settings("optimizer.learning_rate=0.2"))
    assert_one_sentence(outcome, "optimizer.learning_rate is 0.1 there and 0.2 now", "--directory")
    assert contents(tmp_path / "run") == before


def test_a_folder_that_holds_no_run_is_refused_and_stays_as_it_is(call: command.InProcess, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert_one_sentence(call(*REGRESSION), "run must be empty or hold a run", "--directory")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("path", ["own.py", "own.py/x"])
def test_a_directory_that_cannot_be_created_is_refused(call: command.InProcess, tmp_path: Path, path: str) -> None:
    assert_one_sentence(call("--directory", path), path, "--directory")
    assert (tmp_path / "own.py").read_text() == OWN


def test_a_checkpoint_of_another_run_is_refused_and_stays(call: command.InProcess, tmp_path: Path) -> None:
    assert call(*REGRESSION, *settings("data.num_features=5"), "--directory", "other").code == 0
    assert call(*REGRESSION).code == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    (tmp_path / "run" / "results.json").unlink()
    shutil.copytree(tmp_path / "other" / "checkpoints", checkpoints, dirs_exist_ok=True)
    before = contents(tmp_path / "run", without=[".lock", "tensorflow.log"])
    outcome = call(*REGRESSION)
    assert_one_sentence(outcome, "run/checkpoints/step-", "is a checkpoint of another run", "Move it away")
    after = contents(tmp_path / "run", without=[".lock", "tensorflow.log"])
    assert before.items() <= after.items()
    assert (tmp_path / "run" / "config.toml").exists()
    assert config.load(tmp_path / "run" / "config.toml").data.num_features == 10


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("begun", "num_bytes"),
    [(False, 600), (True, 600), (True, 4000)],
    ids=["before config.toml", "before the next checkpoint", "before the model"],
)
def test_after_a_full_disk_the_same_command_ends_with_the_same_weights(
    call: command.InProcess, tmp_path: Path, begun: bool, num_bytes: int
) -> None:
    """The disk is full in a new folder, or in that of a run that crashed in its second epoch."""
    flags = [*REGRESSION, *settings("training.checkpoint_seconds=0", "training.epochs=2", "training.steps_per_call=16")]
    assert call(*flags, "--directory", "whole").code == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    if begun:
        shutil.copytree(tmp_path / "whole", tmp_path / "run", ignore=lambda *_: ["results.json", "model.keras"])
        sorted(checkpoints.iterdir())[-1].unlink()
    before = contents(checkpoints)
    with command.file_size_limit(num_bytes):
        outcome = call(*flags)
    next_run = "resumes from the last checkpoint" if begun else "starts from the beginning"
    assert_one_sentence(outcome, "must have room", "Free some space", next_run, before_training=False)
    assert "run" in outcome.err.partition("could not be written")[0].split("and ")[-1], "what could not be written"
    assert before.items() <= contents(checkpoints).items(), "what was saved stays"
    assert call(*flags).code == 0
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_under_tensorflows_own_files_is_reported_in_the_same_words(call: command.InProcess) -> None:
    outcome = call("--directory", "run", *settings("trainer=own.DiskFull"))
    assert_one_sentence(outcome, "must have room", "run/events.v2", "Free some space")


def test_a_device_without_the_memory_for_a_step_is_named_with_the_way_out(call: command.InProcess) -> None:
    outcome = call("--directory", "run", *settings("trainer=own.TooLarge"))
    message = "CPU:0 must have memory for the step, and a tensor of shape [8,4] and type float could not be allocated."
    assert_one_sentence(outcome, message, "Use a smaller batch", before_training=False)


def test_an_error_that_nobody_foresaw_says_its_reason(call: command.InProcess) -> None:
    """On standard error or in its traceback."""
    try:
        said = call("--directory", "run", *settings("trainer=own.Unforeseen")).err
    except tf.errors.OpError as error:
        said = error.message
    assert "the true reason" in said
