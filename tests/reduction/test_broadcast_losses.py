"""Losses of fewer values than their masks or weights have: Keras repeats the values, and divides by the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LENGTH, NUM_EXAMPLES = 6, 17
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"]),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 3, balance="parameters"),
}
random = np.random.default_rng(0)
LENGTHS = random.integers(1, LENGTH + 1, NUM_EXAMPLES)
IS_THERE = np.arange(LENGTH) < LENGTHS[:, None]
SEQUENCES = (random.normal(size=(NUM_EXAMPLES, LENGTH, 3)) * IS_THERE[..., None]).astype("float32")
TARGETS = random.normal(size=(NUM_EXAMPLES, LENGTH, 1)).astype("float32")
WEIGHTS = random.uniform(0.5, 2.0, (NUM_EXAMPLES, LENGTH)).astype("float32")


def mean_over_time(targets: Any, outputs: Any) -> Any:
    """One value for each example, `[batch, 1]`."""
    return ops.mean(ops.square(targets - outputs), axis=1)


class MeanOverTime(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return mean_over_time(y_true, y_pred)


def recurrent(loss: Any, *, masked: bool) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        first = [layers.Masking()] if masked else []
        hidden = [*first, layers.LSTM(4, return_sequences=True), layers.Dense(1)]
        model = keras.Sequential([keras.Input((LENGTH, 3)), *hidden])
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    return build


def one_step() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Reshape((1, 2))])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


CASES: dict[str, tuple[Callable[[], keras.Model], tuple[np.ndarray, ...]]] = {
    "mask": (recurrent(mean_over_time, masked=True), (SEQUENCES, TARGETS)),
    "weights": (recurrent(mean_over_time, masked=False), (SEQUENCES, TARGETS, WEIGHTS)),
    "mask and weights": (recurrent(mean_over_time, masked=True), (SEQUENCES, TARGETS, WEIGHTS)),
    "divided by weights": (
        recurrent(MeanOverTime(reduction="mean_with_sample_weight"), masked=True),
        (SEQUENCES, TARGETS, WEIGHTS),
    ),
    "divided by a mask": (
        recurrent(MeanOverTime(reduction="mean_with_sample_weight"), masked=True),
        (SEQUENCES, TARGETS),
    ),
    "loss of Keras": (one_step, (SEQUENCES[:, 0], TARGETS[:, :1].repeat(2, 2), WEIGHTS[:, :4])),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_values_that_weights_repeat_train_as_on_one_device(case: str, strategy: str) -> None:
    build, arrays = CASES[case]
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(7)
    small.assert_trains_as_one_device(build, lambda: dataset, STRATEGIES[strategy])
