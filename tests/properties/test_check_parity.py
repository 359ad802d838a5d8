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
from tests.support import parity_cases, small
from tfpar.parity import relative_difference

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


@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_an_equal_model_is_reported_as_equal_and_the_table_is_printed(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_check_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tfpar.check_parity(named(), small.data(), mirrored(), num_steps=1)


def test_dropout_is_reported_with_the_layer_that_differs_first(capsys: pytest.CaptureFixture[str]) -> None:
    report = tfpar.check_parity(named(lambda: keras.layers.Dropout(0.5, seed=1)), small.data(), mirrored())
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.endswith("hidden/kernel"), "its gradient goes through the masks"
    after_first = {entry.name.split("/", 1)[-1]: entry.after_first_step for entry in report.weights}
    assert after_first["hidden/kernel"] > report.tolerance
    printed = " ".join(capsys.readouterr().out.split())
    assert "differs first in" in printed
    assert "hidden/kernel" in printed


def test_the_first_difference_is_the_layer_that_differs_after_one_step_not_the_first_of_the_model() -> None:
    """Statistics of each replica alone: only those of the normalization differ before anything else follows."""
    build = named(lambda: keras.layers.BatchNormalization(name="normalize", scale=False, center=False), metrics=[])
    report = tfpar.check_parity(build, parity_cases.batches(16, 8), mirrored(), verbose=0)
    assert not report.equal
    assert "differs" in str(report.first_difference) or "/" in str(report.first_difference)
    worst = [entry.name for entry in report.weights if entry.after_first_step > report.tolerance]
    assert report.first_difference == worst[0]


def test_float32_shows_the_rounding_of_ordinary_training() -> None:
    report = tfpar.check_parity(named(), small.data(), mirrored(), dtype="float32", verbose=0, num_steps=4)
    assert report.equal
    assert report.num_steps == 4
    assert report.tolerance == 1e-5


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
        assert keras.config.floatx() == "float64"
        if fails == "build":
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
