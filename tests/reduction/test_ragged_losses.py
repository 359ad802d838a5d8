"""Losses whose values are ragged: summed and averaged as Keras does, or refused in one sentence."""

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

pytestmark = pytest.mark.usefixtures("logical_cpus")

FEATURES = np.random.default_rng(0).normal(size=(17, 4)).astype("float32")
TARGETS = FEATURES[:, :3]


def model_of(loss: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    return build


def ragged(targets: Any, outputs: Any) -> Any:
    """Rows of equal lengths, which Keras averages."""
    return tf.RaggedTensor.from_tensor(ops.square(targets - outputs))


def positive(targets: Any, outputs: Any) -> Any:
    """Rows of different lengths, which Keras sums and cannot average."""
    values = ops.square(targets - outputs)
    return tf.ragged.boolean_mask(values, targets > 0)


class Positive(keras.losses.Loss):
    """The same as an object."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return positive(y_true, y_pred)


@small.each_splitting_strategy
@pytest.mark.parametrize("loss", [ragged, Positive(reduction="sum")], ids=["mean", "sum"])
def test_a_loss_of_ragged_values_trains_as_on_one_device(loss: Any, strategy: str) -> None:
    build = model_of(loss)

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(8)

    small.assert_trains_as_one_device(build, data, small.SPLITTING_STRATEGIES[strategy], epochs=1)


@small.each_splitting_strategy
def test_rows_of_different_lengths_that_are_to_be_averaged_are_refused(strategy: str) -> None:
    trainer = tfpar.Trainer(model_of(positive), small.SPLITTING_STRATEGIES[strategy]())
    with pytest.raises(ValueError, match=r"rows of different lengths needs reduction='sum', .* 'sum_over_batch_size'"):
        trainer.fit(FEATURES, TARGETS, batch_size=8, verbose=0)
