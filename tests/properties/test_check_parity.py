"""`tfpar.check_parity` says whether a model trains as on one device, and where it first does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import objective_cases, parity_cases, small
from tfpar.parity import Difference, ParityReport, relative_difference

pytestmark = pytest.mark.usefixtures("logical_cpus")


def mirrored() -> tfpar.Strategy:
    return small.STRATEGIES["mirrored"]()


def named(*layers: Callable[[], Any], **compiled: Any) -> Callable[[], keras.Model]:
    """A classifier whose layers bear names: hidden, then those given, then kinds."""

    def build() -> keras.Model:
        hidden = keras.layers.Dense(8, "tanh", name="hidden")
        given = [make() for make in layers]
        model = keras.Sequential([keras.Input((5,)), hidden, *given, keras.layers.Dense(3, name="kinds")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, **{"metrics": ["accuracy"], **compiled})
        return model

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_an_equal_model_is_reported_as_equal_and_the_table_is_printed(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the check warns of nothing
        report = tfpar.check_parity(named(), small.data(), small.STRATEGIES[strategy]())
    assert report.equal
    assert report.first_difference is None
    assert report.num_steps == small.STEPS_PER_EPOCH
    assert report.tolerance == 1e-9, "in float64 nothing hides in rounding"
    assert [entry.name for entry in report.logs] == ["accuracy", "loss"]
    assert len(report.weights) == 4
    printed = capsys.readouterr().out
    assert "equal to one device" in printed
    assert "hidden/kernel" in printed.replace("…", "")
    assert "differs" not in printed


class Sampling(keras.layers.Layer):
    """The sampling layer of a variational autoencoder, with a seed generator of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=self.seed_generator)


@tf.function
def noise(like: tf.Tensor) -> tf.Tensor:
    return tf.random.normal(tf.shape(like), dtype=like.dtype)


class Noise(keras.layers.Layer):
    """Draws with TensorFlow, in a function that is traced once for all models."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * noise(inputs)


def of_images(layer: keras.layers.Layer) -> Callable[[Any], Any]:
    """The layer on rows of eight numbers as images."""
    return keras.Sequential([keras.layers.Reshape((4, 2, 1)), layer, keras.layers.Flatten()])


# Layers that differ by design where a batch is divided, and the type in which a model with one computes.
BY_DESIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "Dropout": (lambda: keras.layers.Dropout(0.5, name="differs"), "float64"),
    "GaussianNoise": (lambda: keras.layers.GaussianNoise(0.5, name="differs"), "float64"),
    "RandomFlip": (lambda: of_images(keras.layers.RandomFlip(name="differs")), "float64"),
    "RandomRotation": (lambda: of_images(keras.layers.RandomRotation(0.1, name="differs")), "float32"),
    "sampling": (lambda: Sampling(name="differs"), "float64"),
    "function of TensorFlow": (lambda: Noise(name="differs"), "float64"),
    "BatchNormalization": (lambda: keras.layers.BatchNormalization(name="differs"), "float64"),
}


@pytest.mark.few(1)
@pytest.mark.crossed
@pytest.mark.parametrize("kind", BY_DESIGN)
@small.each_splitting_strategy
def test_what_differs_by_design_is_named_and_all_else_is_compared(
    kind: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layer, dtype = BY_DESIGN[kind]
    report = tfpar.check_parity(named(layer), small.data(), small.SPLITTING_STRATEGIES[strategy](), num_steps=4)
    assert report.equal, report.first_difference
    assert (report.switched_off, report.precision.dtype) == (("differs",), dtype)
    printed = " ".join(capsys.readouterr().out.split())
    assert "with differs switched off, which differs by design" in printed
    assert ("as the model does not compute in float64" in printed) == (dtype == "float32")


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [tfpar.SingleDevice, lambda: tfpar.Pipeline(2, 1, balance="parameters")])
@pytest.mark.parametrize("kind", ["Dropout", "BatchNormalization"])
def test_nothing_is_switched_off_where_a_batch_is_not_divided(strategy: Any, kind: str) -> None:
    report = tfpar.check_parity(named(BY_DESIGN[kind][0]), small.data(), strategy(), num_steps=4, verbose=0)
    assert report.equal, report.first_difference
    assert report.switched_off == ()


def test_synchronized_normalization_is_compared_on_replicas() -> None:
    build = named(lambda: keras.layers.BatchNormalization(synchronized=True))
    report = tfpar.check_parity(build, small.data(), mirrored(), num_steps=4, verbose=0)
    assert (report.equal, report.switched_off) == (True, ())


def test_a_difference_behind_a_random_layer_is_found() -> None:
    mixing = [lambda: keras.layers.UnitNormalization(axis=0), BY_DESIGN["Dropout"][0]]
    strategy = tfpar.Pipeline(2, 2, balance="parameters", allow_batch_dependent_layers=True)
    report = tfpar.check_parity(named(*mixing), small.data(), strategy, num_steps=2, verbose=0)
    assert not report.equal
    assert str(report.first_difference).endswith("hidden/kernel")
    assert report.switched_off == ("differs",)


def test_random_layers_draw_again_after_a_check() -> None:
    build = named(BY_DESIGN["function of TensorFlow"][0])
    tfpar.check_parity(build, small.data(), mirrored(), num_steps=1, dtype="float32", verbose=0)
    trainer = tfpar.Trainer(build, mirrored())
    one, other = (trainer.predict(parity_cases.inputs(8).astype("float32"), verbose=0) for _ in range(2))
    assert not np.allclose(one, other), "no trace of the check is used"


WRITTEN_FOR_FLOAT32: dict[str, Callable[[], keras.Model]] = {
    "metric": lambda: named(metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)])(),
    "layer": named(lambda: keras.layers.Lambda(lambda rows: rows * tf.ones([], tf.float32))),
    "type of a layer": named(lambda: keras.layers.Activation("linear", dtype="float32", name="narrow")),
}


@pytest.mark.few(2)
@pytest.mark.crossed
@pytest.mark.parametrize("kind", WRITTEN_FOR_FLOAT32)
@small.each_splitting_strategy
def test_a_model_that_is_written_for_float32_is_compared_in_it(kind: str, strategy: str) -> None:
    make = small.SPLITTING_STRATEGIES[strategy]
    report = tfpar.check_parity(WRITTEN_FOR_FLOAT32[kind], small.data(), make(), num_steps=4, verbose=0)
    assert report.equal, report.first_difference
    assert (report.precision.dtype, report.tolerance) == ("float32", 1e-5)
    assert "\x1b" not in report.conditions
    assert ("'narrow' computes in float32" in report.conditions) == (kind == "type of a layer")
    assert keras.config.floatx() == "float32"


@pytest.mark.parametrize(
    ("weight", "log", "first"),
    [
        ((0.0, 0.0), 0.0, None),
        ((1.0, 0.0), 0.0, "weight"),
        ((0.0, 1.0), 0.0, "weight"),
        ((0.0, 0.0), 1.0, "loss"),
        ((0.0, float("nan")), 0.0, "weight"),
        ((0.0, 0.0), float("nan"), "loss"),
    ],
)
def test_a_report_is_equal_if_it_has_no_first_difference(
    weight: tuple[float, float], log: float, first: str | None
) -> None:
    entries = (Difference("weight", *weight),), (Difference("loss", float("nan"), log),)
    report = ParityReport("Mirrored", 20, 1e-9, *entries)
    assert (report.equal, report.first_difference) == (first is None, first)


@pytest.mark.extended
def test_logs_of_objectives_and_of_a_train_step_are_compared_where_a_model_overrides_metrics() -> None:
    class Own(objective_cases.VAE):
        @property
        def metrics(self) -> list[keras.Metric]:
            return [self.reconstruction]

        def _counted(self, loss: Any, batch: Any) -> Any:
            return {"loss": loss, **super()._counted(loss, batch), "own": loss}

    def build() -> keras.Model:
        model = Own()
        model.compile("adam")
        return model

    report = tfpar.check_parity(build, objective_cases.pairs_with_noise(), mirrored(), num_steps=1, verbose=0)
    assert report.equal, report.first_difference
    assert {entry.name for entry in report.logs} == {"loss", "reconstruction"}


def test_float32_shows_the_rounding_of_ordinary_training() -> None:
    report = tfpar.check_parity(named(), small.data(), mirrored(), dtype="float32", verbose=0, num_steps=4)
    assert report.equal
    assert report.num_steps == 4
    assert report.tolerance == 1e-5


@pytest.mark.extended
def test_metrics_without_a_name_of_their_own_are_compared_too() -> None:
    """Keras numbers them in a process: the second model's is auc_1."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC()])
        return model

    report = tfpar.check_parity(build, parity_cases.binary_data(), mirrored(), num_steps=3, verbose=0)
    assert report.equal
    assert len(report.logs) == 2


def test_nothing_is_printed_when_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    tfpar.check_parity(named(), small.data(), small.STRATEGIES["single_device"](), num_steps=1, verbose=0)
    assert capsys.readouterr().out == ""


def test_a_weight_without_a_gradient_but_rounding_errors_is_equal() -> None:
    """A bias of the keys adds the same score to all keys, so its gradient is zero, and Adam enlarges its rounding."""

    def build() -> keras.Model:
        inputs = keras.Input((4, 6))
        outputs = keras.layers.Dense(3)(keras.layers.MultiHeadAttention(2, 3)(inputs, inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    rng = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensors((rng.normal(size=(8, 4, 6)), rng.integers(0, 3, (8, 4)))).repeat(2)
    report = tfpar.check_parity(build, data, mirrored(), verbose=False)
    assert report.equal, report.first_difference
    assert any("key/bias" in weight.name for weight in report.weights)


@pytest.mark.parametrize("fails", ["build", "data"])
def test_the_types_of_keras_are_as_before_after_an_exception(fails: str) -> None:
    def build() -> keras.Model:
        if fails == "build":
            assert keras.config.floatx() == "float64"
            raise ZeroDivisionError
        return named()()

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        dataset = small.data() if fails == "build" else tf.data.Dataset.from_tensors((tf.zeros([2, 9]), tf.zeros([2])))
        with pytest.raises((ZeroDivisionError, ValueError)):
            tfpar.check_parity(build, dataset, mirrored())
        assert keras.config.floatx() == "float32"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("arguments", [{"dtype": "float16"}, {"num_steps": 0}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of \['float64', 'float32'\] and num_steps at least 1"):
        tfpar.check_parity(named(), small.data(), mirrored(), **arguments)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one batch, and the dataset is empty"):
        tfpar.check_parity(named(), small.data().take(0), mirrored())


def test_relative_difference_is_measured_against_the_largest_value_expected() -> None:
    assert relative_difference(np.array([1.0, 2.0]), np.array([1.0, 2.5])) == 0.2
    assert relative_difference(np.array([0.25]), np.array([0.0])) == 0.25, "absolute where nothing is expected"
    assert relative_difference(np.array([]), np.array([])) == 0.0
    assert np.isnan(relative_difference(np.array([np.nan]), np.array([1.0]))), "not a number is never equal"
