"""Trials and comparisons on GPUs: the rounding of TensorFloat-32 accuses no layer. A layer rounds in place of a GPU."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def tensor_float_32(x: Any) -> Any:
    """Round to 11 significant bits, where TensorFlow allows it, as GPUs do for some numbers of rows."""
    if not tf.config.experimental.tensor_float_32_execution_enabled():
        return x
    rounded = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), -(1 << 13)), tf.float32)
    return tf.where(tf.shape(x)[0] > 2, rounded, x)


class OnTensorCores(layers.Layer):
    """A product whose precision depends on the number of rows."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, inputs: Any) -> Any:
        return tf.matmul(tensor_float_32(inputs), self.kernel)


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), OnTensorCores(), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(autouse=True)
def as_by_default(logical_cpus: list[str]) -> None:
    assert tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.SPLITTING_STRATEGIES)
def test_rounding_of_products_is_no_batch_dependence(strategy: str) -> None:
    trainer = tfpar.Trainer(build, small.SPLITTING_STRATEGIES[strategy]())
    trainer.fit(small.data().take(1), verbose=0)
    assert tf.config.experimental.tensor_float_32_execution_enabled(), "steps run as the user chose"


@pytest.mark.parametrize("enabled", [False, True])
def test_the_users_choice_is_restored_after_a_refusal(enabled: bool) -> None:
    def mixing() -> keras.Model:
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), layers.Softmax(axis=0)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    tf.config.experimental.enable_tensor_float_32_execution(enabled)
    try:
        with pytest.raises(ValueError, match="'softmax"):
            tfpar.Trainer(mixing, tfpar.Mirrored(["CPU:0", "CPU:1"])).fit(small.data(), verbose=0)
        assert tf.config.experimental.tensor_float_32_execution_enabled() == enabled
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_the_check_of_parity_compares_without_it() -> None:
    batches, strategy = parity_cases.batches(32, 4), tfpar.Mirrored(["CPU:0", "CPU:1"])  # two rows for each replica
    report = tfpar.check_parity(build, batches, strategy, num_steps=4, dtype="float32", verbose=0)
    assert report.equal, report.first_difference
