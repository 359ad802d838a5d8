"""Training after `tf.config.experimental.enable_op_determinism()`, which refuses TensorFlow's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar._compat import tf_determinism

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Choose deterministic operations for a test only."""
    tf.config.experimental.enable_op_determinism()
    yield
    tf_determinism.config.disable_op_determinism()


def build_model() -> keras.Model:
    """Return a model of two layers."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def examples() -> tf.data.Dataset:
    """Return two batches of different sizes."""
    numbers = np.linspace(-1, 1, 6 * 6, dtype="float32").reshape(6, 6)
    return tf.data.Dataset.from_tensor_slices((numbers[:, :4], numbers[:, 4:])).batch(4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "strategy",
    [tfpar.SingleDevice, lambda: tfpar.Mirrored(TWO), lambda: tfpar.Pipeline(2, 2, devices=TWO)],
    ids=["one device", "replicas", "stages"],
)
def test_deterministic_operations_train_as_one_device_and_report_no_time_of_waiting(
    strategy: Callable[[], tfpar.Strategy],
) -> None:
    keras.utils.set_random_seed(0)
    expected = build_model().fit(examples(), epochs=2, shuffle=False, verbose=0).history["loss"]

    trainer, throughput = tfpar.Trainer(build_model, strategy(), seed=0), tfpar.Throughput()
    history = trainer.fit(examples(), epochs=2, verbose=0, callbacks=[throughput]).history

    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    assert sorted(throughput.summary) == ["examples_per_second", "step_milliseconds"]


def test_a_pipeline_is_measured_and_the_operations_stay_deterministic() -> None:
    trainer = tfpar.Trainer(build_model, tfpar.Pipeline(2, 2, devices=TWO), seed=0)

    preview = trainer.preview(examples())

    assert preview.planned.step_seconds > 0
    assert tf_determinism.is_enabled()


def test_a_trainer_may_choose_them_between_two_calls() -> None:
    tf_determinism.config.disable_op_determinism()
    trainer = tfpar.Trainer(build_model, tfpar.SingleDevice(), seed=0)
    first = trainer.fit(examples(), verbose=0).history["loss"]
    tf.config.experimental.enable_op_determinism()
    assert trainer.fit(examples(), verbose=0).history["loss"] < first
