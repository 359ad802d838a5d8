"""A run that resumes with other settings: more epochs, and settings that change no weight; others are refused."""

import json
import re
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import contents, metrics, settings
from tfpar import config

# Everything with a state: Dropout and augmentation draw, Adam and the moving average remember, 5 steps an epoch end
# within 2 accumulated ones, the warm-up within the second epoch, and two callbacks count epochs.
FLAGS = [
    *("--config", "digits", "--directory", "run"),
    *settings("training.global_batch_size=300", "model.dropout=0.25", 'data.augmentation=["shift"]'),
    *settings("training.gradient_accumulation_steps=2", "training.ema_momentum=0.5", "optimizer.warmup_steps=8"),
    *settings("callbacks.early_stopping_patience=3", "callbacks.reduce_learning_rate_patience=0"),
]
OWN = """
import keras, numpy as np, tensorflow as tf, tfpar

class Unsaved(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return tf.constant(0.01)

class Constant(tfpar.Trainer):
    reads = ("training.global_batch_size",)
    rate = 0.01

    def __init__(self, run, strategy):
        rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        self.train_data = tf.data.Dataset.from_tensor_slices((rows, rows.sum(1))).batch(32)
        self.validation_data, self.num_train_examples = None, 64
        super().__init__(lambda: self.build_model(run), strategy, run.seed)

    def build_model(self, run):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(self.rate_of(run)), "mse")
        return model

    def rate_of(self, run):
        return self.rate

class Still(Constant):
    rate = 0.0  # the loss never falls

class Interrupts(Constant):
    def fit(self, *arguments, callbacks, **more):
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.interrupt())
        stops = more["epochs"] > 1 and not any(type(self).stopped)
        type(self).stopped.append(stops)
        return super().fit(*arguments, callbacks=[*callbacks, *[stop] * stops], **more)

    stopped = []

class Cosine(Constant):
    def rate_of(self, run):
        return keras.optimizers.schedules.CosineDecay(0.01, 2 * run.training.epochs)

class Model(keras.Sequential):
    def objectives(self):
        def squares(batch, training):
            rows, targets = batch
            return tf.square(self(rows, training=training)[:, 0] - targets)
        return [tfpar.Objective("loss", squares, optimizer=self.own)]

class CosineOfAnObjective(Cosine):
    def build_model(self, run):
        model = Model([keras.Input((3,)), keras.layers.Dense(1)])
        model.own = keras.optimizers.SGD(self.rate_of(run))
        model.compile("sgd")
        return model

class Silent(Constant):
    def rate_of(self, run):
        return Unsaved()
"""


def one_line(text: str) -> str:
    return " ".join(text.split())


def epochs(number: int) -> list[str]:
    return settings(f"training.epochs={number}")


@pytest.fixture
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = tmp_path_factory.getbasetemp() / "tfds"
    return [*FLAGS, *settings(f"data.directory={data}")]


@pytest.mark.extended
def test_a_finished_run_trains_more_epochs_as_if_it_had_never_ended(
    call: command.InProcess, digits: list[str], tmp_path: Path
) -> None:
    assert call(*digits, *epochs(4), "--directory", "whole").code == 0
    assert call(*digits, *epochs(2)).code == 0
    shorter = (tmp_path / "run" / "model.keras").read_bytes()
    free = settings("callbacks.tensorboard=false", "training.keep_checkpoints=1", "training.steps_per_call=2")
    longer = call(*digits, *epochs(4), *free)
    assert longer.code == 0, longer
    assert "Resuming after epoch 2, with training.epochs = 4 instead of 2, training.steps_per_call = 2 " in one_line(
        longer.out
    )
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert (tmp_path / "run" / "model.keras").read_bytes() != shorter
    recorded = config.load(tmp_path / "run" / "config.toml")
    assert (recorded.training.epochs, recorded.training.keep_checkpoints, recorded.callbacks.tensorboard) == (
        4,
        1,
        False,
    )
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.npz"))) == 1
    assert json.loads((tmp_path / "run" / "results.json").read_text())["epochs"] == 4
    again = call(*digits, *epochs(4), *free)
    assert "trained to its end already" in again.out
    assert "4 epochs, 10 steps" in again.out


def test_a_longer_run_that_was_cut_short_is_not_taken_for_finished(call: command.InProcess, tmp_path: Path) -> None:
    """The shorter run's results are no sign of its end."""
    flags = ["--directory", "run", *settings("trainer=own.Interrupts")]
    assert call(*flags, *epochs(1)).code == 0
    assert call(*flags, *epochs(3)).code == 130, "it interrupts itself in the second epoch"
    resumed = call(*flags, *epochs(3))
    assert resumed.code == 0, resumed
    assert "Resuming after epoch 1" in resumed.out
    assert call("--directory", "whole", *settings("trainer=own.Constant"), *epochs(3)).code == 0
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_fewer_epochs_than_are_trained_are_refused(call: command.InProcess, tmp_path: Path) -> None:
    flags = ["--directory", "run", *settings("trainer=own.Constant")]
    assert call(*flags, *epochs(3)).code == 0
    before = contents(tmp_path / "run", without=[".lock", "tensorflow.log"])
    refused = call(*flags, *epochs(2))
    assert refused.code == 1
    assert (
        "error: training.epochs = 2 is less than the epochs already trained in run: epoch 3. Set it to at least 3"
        in refused.err
    )
    assert contents(tmp_path / "run", without=[".lock", "tensorflow.log"]) == before


def test_after_an_early_stop_more_epochs_change_nothing(call: command.InProcess, tmp_path: Path) -> None:
    stops = settings("callbacks.early_stopping_patience=0", "callbacks.monitor=loss")
    flags = ["--directory", "run", *settings("trainer=own.Still"), *stops]
    assert call(*flags, *epochs(4)).code == 0
    assert len(metrics(tmp_path / "run")) == 2
    before = command.weights(tmp_path / "run")
    longer = call(*flags, *epochs(9))
    assert longer.code == 0, longer
    assert "a callback has ended the training there, so more epochs change nothing" in one_line(longer.out)
    assert len(metrics(tmp_path / "run")) == 2
    after = command.weights(tmp_path / "run")
    assert all((after[name] == array).all() for name, array in before.items())
    assert "trained to its end already" in call(*flags, *epochs(9)).out


def test_a_directory_alone_resumes_its_run_with_its_own_configuration(call: command.InProcess, tmp_path: Path) -> None:
    assert (
        call(
            "--directory", "run", *settings("trainer=own.Interrupts", "training.global_batch_size=16"), *epochs(2)
        ).code
        == 130
    )
    resumed = call("--directory", "run")
    assert resumed.code == 0, resumed
    assert "Resuming after epoch 0 and 1 steps of the next." in resumed.out
    assert len(metrics(tmp_path / "run")) == 2
    assert config.load(tmp_path / "run" / "config.toml").training.global_batch_size == 16
    assert call("--directory", "run", *epochs(3)).code == 0
    assert len(metrics(tmp_path / "run")) == 3
    refused = call("--directory", "run", *settings("training.global_batch_size=8"))
    assert refused.code == 1
    assert "(training.global_batch_size is 16 there and 8 now)" in refused.err
    assert "or resume that run with --directory run alone" in refused.err
    assert "global_batch_size = 16" in call("--directory", "run", "--print_config").out


def test_a_run_resumes_under_another_strategy_with_the_weights_of_one_device(
    call: command.InProcess, logical_cpus: list[str], tmp_path: Path
) -> None:
    first = settings("trainer=own.Constant", "strategy.kind=single_device")
    assert call("--directory", "whole", *first, *epochs(4)).code == 0
    assert call("--directory", "run", *first, *epochs(2)).code == 0
    mirrored = settings(
        "strategy.kind=mirrored",
        'strategy.devices=["CPU:0", "CPU:1"]',
        f"strategy.num_logical_cpus={len(logical_cpus)}",
    )
    resumed = call("--directory", "run", *mirrored, *epochs(4))
    assert resumed.code == 0, resumed
    said = (
        'epochs = 4 instead of 2, strategy.kind = "mirrored" instead of "single_device", strategy.devices = ["CPU:0",'
    )
    assert said in one_line(resumed.out)
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole", tolerance=1e-6)
    assert "Mirrored over 2 replicas" in resumed.out
    for line, expected in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("trainer", ["Cosine", "CosineOfAnObjective"])
def test_an_optimizer_that_depends_on_the_number_of_epochs_is_refused(
    call: command.InProcess, tmp_path: Path, trainer: str
) -> None:
    flags = ["--directory", "run", *settings(f"trainer=own.{trainer}")]
    assert call(*flags, *epochs(2)).code == 0
    before = contents(tmp_path / "run", without=[".lock", "tensorflow.log"])
    refused = call(*flags, *epochs(3))
    assert refused.code == 1
    assert refused.err.startswith("error: training.epochs is 2 in run and 3 now, and the optimizer depends on it")
    assert refused.err.count("\n") == 1
    assert contents(tmp_path / "run", without=[".lock", "tensorflow.log"]) == before
    assert call(*flags, *epochs(2), *settings("callbacks.tensorboard=false")).code == 0, "all else may change"


def test_a_schedule_that_cannot_be_saved_is_refused_before_training(call: command.InProcess) -> None:
    refused = call("--directory", "run", *settings("trainer=own.Silent"), *epochs(1))
    assert refused.code == 1
    assert "must have a configuration to be saved with the model" in refused.err
    assert refused.err.count("\n") == 1


def test_a_finished_run_answers_without_starting_tensorflow(call: command.InProcess, tmp_path: Path) -> None:
    flags = ["--directory", "run", *settings("trainer=own.Constant"), *epochs(1)]
    assert call(*flags).code == 0
    again = command.run(flags, tmp_path, tmp_path, code=["-X", "importtime", "-m", "tfpar.train"])
    assert again.code == 0, again
    assert "trained to its end already" in again.out
    imported = set(re.findall(r"\| +(\w+)[.\n]", again.err))
    assert "pydantic" in imported, "this test reads the list of imports rightly"
    assert not {"tensorflow", "keras", "numpy", "rich", "own"} & imported
