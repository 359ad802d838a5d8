"""A user's trainer class under the train command: its options and settings, the printed plan and the record."""

import json
import tomllib
from pathlib import Path

import pydantic
import pytest

from tests.support import command
from tests.support.command import settings
from tfpar import config
from tfpar.config import settings_read

OWN = """
import keras, pydantic, tensorflow as tf, tfpar

class Free(tfpar.Trainer):
    reads = ("options",)

    def __init__(self, run, strategy):
        self.asked = run.options
        rows = tf.data.Dataset.from_tensor_slices((tf.ones([8, 3]), tf.ones([8, 1])))
        self.train_data, self.validation_data, self.num_train_examples = rows.batch(4), None, 8
        super().__init__(self.build, strategy)

    def build(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(self.asked.get("units", 1), dtype="float64")])
        model.compile(keras.optimizers.SGD(0.25, clipvalue=2.0), "mse")
        return model

    def report(self, results):
        return f"options {self.asked}"

class Checked(Free):
    reads = ()

    class Options(pydantic.BaseModel):
        units: int = pydantic.Field(1, ge=1)
        rate: float | None = 0.5
        words: list[str] = []

        @pydantic.field_validator("units")
        @classmethod
        def prime(cls, units):
            if units == 4:
                raise ValueError("4 is not prime.")
            return units

class Silent(Free):
    reads = ()

class Scaled(Free):
    reads = ("training.global_batch_size",)

class Misspelt(Free):
    reads = ("optimiser",)

class OneName(Free):
    reads = "data"

class NoModel(Free):
    Options = dict

def deviation(targets, outputs):
    return keras.ops.mean(keras.ops.abs(targets - outputs), axis=-1)

class Activity(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="activity")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs

class Measured(Free):
    def build(self):
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(1)(Activity()(inputs)))
        metrics = [deviation] + [lambda targets, outputs: targets - outputs] * self.asked.get("odd", 0)
        model.compile("sgd", "mse", metrics=metrics, weighted_metrics=["mae"])
        return model

class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.divergence = keras.layers.Dense(1), keras.metrics.Mean(name="divergence")

    def call(self, inputs):
        self.divergence.update_state(inputs)
        return self.dense(inputs)

class Unbuilt(Free):
    def build(self):
        model = Autoencoder()
        model.compile("sgd", "mse")
        return model

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tf.ones([4, 3]), tf.ones([4, 1])

class Given(Free):
    reads = ("options", "training.global_batch_size")

    def __init__(self, run, strategy):
        super().__init__(run, strategy)
        dataset, arrays = self.train_data, (tf.ones([8, 3]), tf.ones([8, 1]))
        batches = (batch for batch in dataset)
        kinds = {"PyDataset": Batches(), "generator": batches, "arrays": arrays, "list": [1, 2], "None": None}
        kinds["repeated"] = dataset.repeat()
        for name, kind in run.options.items():
            setattr(self, name, kinds.get(kind, kind))

class Coloured(Free):
    def build(self):
        raise ValueError("\\x1b[1mIncompatible shapes.\\x1b[0m\\n\\nArguments received:\\n  \\n  x=1")

class Speechless(Free):
    def report(self, results):
        return None

class BadReport(Free):
    def report(self, results):
        raise ValueError("no such digit")
"""


def flags(name: str, *overrides: str) -> list[str]:
    return ["--directory", "run", *settings(f"trainer=own.{name}", "training.epochs=1", *overrides)]


def test_free_options_reach_the_trainer_and_are_printed_and_recorded(call: command.InProcess, tmp_path: Path) -> None:
    overrides = ["options.units=2", "options.deep.names=['a', 'b']", "options.word=none"]
    outcome = call(*flags("Free", *overrides))
    assert outcome.code == 0, outcome
    options = {"units": 2, "deep": {"names": ["a", "b"]}, "word": "none"}
    assert f"options {options}" in outcome.out, "as the trainer got them"
    assert "options    units = 2, deep = " in outcome.out
    assert config.load(tmp_path / "run" / "config.toml").options == options


def test_the_header_describes_the_built_objects_and_the_record_leaves_out_unread_settings(
    call: command.InProcess, tmp_path: Path
) -> None:
    outcome = call(*flags("Free", "optimizer.warmup_steps=2"))
    assert outcome.code == 0, outcome
    lines = {line.split()[0]: line for line in outcome.out.split("\n\n")[0].splitlines()}
    assert lines["model"].endswith("4 parameters, float64"), lines["model"]
    assert lines["optimizer"] == "optimizer  SGD, learning_rate 0.25, clipvalue 2"
    assert lines["kernels"] == "kernels    fused, with Keras' results up to the last digits"
    assert lines["data"] == "data       of own.Free, 8 examples to train"
    assert lines["batch"] == "batch      as own.Free makes it, over 1 replica"
    assert "options" not in lines
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert not {"seed", "model", "data"} & recorded.keys()
    assert recorded["optimizer"] == {"warmup_steps": 2}
    assert "precision" not in recorded["training"]
    text = (tmp_path / "run" / "config.toml").read_text()
    assert text.startswith("# Left out, as own.Free does not read them: seed, model, data, training.global_batch_size,")
    again = call(*flags("Free", "optimizer.warmup_steps=2"))
    assert again.code == 0, "the directory holds the same run"
    assert "trained to its end already" in again.out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "options", "monitor"),
    [
        ("Measured", ["options.odd=1"], "lambda"),
        ("Measured", [], "activity"),
        ("Unbuilt", [], "divergence"),
    ],
)
def test_every_metric_that_keras_logs_can_be_watched(
    call: command.InProcess, tmp_path: Path, name: str, options: list[str], monitor: str
) -> None:
    watched = ["callbacks.early_stopping_patience=0", f"callbacks.monitor={monitor}", "callbacks.monitor_mode=min"]
    outcome = call(*flags(name, *watched, *options))
    assert (outcome.code, outcome.err) == (0, "")
    assert monitor in command.metrics(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("name", "monitor", "message"),
    [
        (
            "Measured",
            "devation",
            'monitor = "devation" is no metric of this model. There are: loss, val_loss, deviation',
        ),
        ("Measured", "deviation", 'a lower or a higher value is better: set callbacks.monitor_mode = "min" or "max".'),
        ("Unbuilt", "divergence", 'a lower or a higher value is better: set callbacks.monitor_mode = "min" or "max".'),
    ],
)
def test_what_can_certainly_not_be_watched_is_refused_before_the_first_step(
    call: command.InProcess, name: str, monitor: str, message: str
) -> None:
    outcome = call(*flags(name, "callbacks.early_stopping_patience=0", f"callbacks.monitor={monitor}"))
    assert outcome.code == 1
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "steps"), [("PyDataset", "2"), ("generator", "a number not yet"), ("arrays", "2")])
def test_a_trainer_may_have_all_data_that_fit_takes(
    call: command.InProcess, tmp_path: Path, kind: str, steps: str
) -> None:
    validation = "PyDataset" if kind == "generator" else kind
    data = [f"options.train_data={kind}", f"options.validation_data={validation}", "training.global_batch_size=4"]
    outcome = call(*flags("Given", *data))
    assert (outcome.code, outcome.err) == (0, "")
    assert f"epochs     1, of {steps}" in outcome.out
    (of_epoch,) = command.metrics(tmp_path / "run")
    assert of_epoch["step"] == 2
    assert json.loads((tmp_path / "run" / "results.json").read_text())["val_loss"] == of_epoch["val_loss"]


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("train_data=None", "train_data of own.Given must be a tf.data.Dataset or keras.utils.PyDataset of global"),
        ("train_data=list", "or arrays (inputs, targets), received [1, 2]: "),
        (
            "train_data=repeated",
            "train_data of own.Given must end, as an epoch is one pass over it, and it is repeated",
        ),
        ("validation_data=repeated", "leave out repeat(), or add take(steps) for epochs of so many steps."),
        ("validation_data=generator", "received a generator, which is read once: use tf.data.Dataset.from_generator"),
        (
            "num_train_examples=many",
            "num_train_examples of own.Given must be a whole number of at least 0, received 'm",
        ),
    ],
)
def test_data_of_a_trainer_with_which_no_run_can_end_are_refused_in_one_sentence(
    call: command.InProcess, attribute: str, message: str
) -> None:
    outcome = call(*flags("Given", f"options.{attribute}"))
    assert outcome.code == 1
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_error_of_several_lines_has_no_colours_and_no_empty_lines(call: command.InProcess) -> None:
    lines = ["Incompatible shapes.", "Arguments received:", "  x=1"]
    assert call(*flags("Coloured")).err.splitlines() == [f"error: {line}" for line in lines]


def test_a_report_may_be_none_and_its_error_says_that_the_run_is_saved(call: command.InProcess, tmp_path: Path) -> None:
    outcome = call(*flags("Speechless"))
    assert (outcome.code, outcome.err) == (0, "")
    assert "None" not in outcome.out
    outcome = call(*flags("BadReport")[2:], "--directory", "bad")
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        "error: no such digit",
        "error: The run is trained and saved in bad; its trainer's method `report` failed.",
    ]
    assert (tmp_path / "bad" / "results.json").exists()


def test_the_header_names_the_optimizer_of_a_bundled_trainer(call: command.InProcess) -> None:
    regression = ["--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"]
    overrides = ["data.num_examples=512", "training.epochs=1", "training.global_clipnorm=0.5"]
    mirrored = ["strategy.kind=mirrored", "strategy.num_logical_cpus=4", "training.gradient_accumulation_steps=2"]
    outcome = call(*regression, *settings(*overrides, *mirrored, "training.global_batch_size=64"))
    assert outcome.code == 0, outcome
    expected = "optimizer SGD, learning_rate 0.1, global_clipnorm 0.5, gradient_accumulation_steps 2"
    assert expected in " ".join(outcome.out.split()), outcome.out


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "data.name=mnist",
        "training.global_batch_size=32",
    ],
)
def test_settings_that_a_trainer_does_not_read_are_refused(call: command.InProcess, override: str) -> None:
    outcome = call(*flags("Free", override))
    key = override.partition("=")[0]
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: {key} = ")
    assert "is not read by the trainer own.Free: leave it out, or use a trainer whose `reads` names it." in outcome.err


def test_bundled_trainers_refuse_keys_of_other_networks(call: command.InProcess) -> None:
    for trainer, overrides in (
        ("tfpar.trainers.image_classification.ImageClassification", ["model.name=MobileNetV2"]),
        ("tfpar.trainers.regression.Regression", ["model.name=linear", "data.source=generated"]),
    ):
        outcome = call("--directory", "run", *settings(f"trainer={trainer}", "model.num_blocks=2", *overrides))
        assert outcome.code == 1
        assert f"model.num_blocks = 2 is not read by the trainer {trainer}: leave it out" in outcome.err


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("Silent", "options.units=2", 'options = {"units": 2} is not read by the trainer own.Silent: leave it out'),
        (
            "Checked",
            "options.unit=2",
            "options.unit = 2 is not a known setting: did you mean options.units? Allowed here: ",
        ),
        ("Checked", "options.units=0", "options.units = 0 must be an integer of at least 1 (default 1)."),
        ("Checked", "options.units=4", "options.units = 4 is refused: 4 is not prime."),
        ("Misspelt", "options.x=2", 'must name sections or keys of a run, received "optimiser": did you mean "optimi'),
        ("OneName", "options.x=2", "must be a tuple of names of sections or keys, received 'data': write reads = ("),
        ("NoModel", "options.x=2", "The `Options` of own.NoModel must be a subclass of pydantic.BaseModel"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    call: command.InProcess, name: str, override: str, message: str
) -> None:
    outcome = call(*flags(name, override))
    assert outcome.code == 1
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_options_as_gives_the_model_with_its_defaults_and_unset_values() -> None:
    class Inner(pydantic.BaseModel):
        depth: int = 2

    class Options(pydantic.BaseModel):
        units: int = 1
        rate: float | None = 0.5
        inner: Inner = Inner()

    options = config.load(None, ["options.rate=none", "options.inner.depth=3"]).options_as(Options)
    assert (options.units, options.rate, options.inner.depth) == (1, None, 3)
    with pytest.raises(
        ValueError, match=r"options\.inner\.deep = 3 is not a known setting: did you mean options\.inner\."
    ):
        config.load(None, ["options.inner.deep=3"]).options_as(Options)

    class Open(pydantic.BaseModel, extra="allow"):
        pass

    assert config.load(None, ["options.any=3"]).options_as(Open).model_extra == {"any": 3}


def test_the_record_of_any_trainer_loads_as_the_same_run(tmp_path: Path) -> None:
    run = config.load(None, ["training.precision=float64", "optimizer.settings.beta_1=0.8", "model.l2=0.1"])
    path = tmp_path / "run.toml"
    path.write_text(settings_read.dump_read(run, ["model.l2", "training", "optimizer"], "own.Trainer"))
    assert config.load(path) == run
    assert "[data]" not in path.read_text()
    assert "num_blocks" not in path.read_text().partition("\n")[2]
