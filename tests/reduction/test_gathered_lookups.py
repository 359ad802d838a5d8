"""Rows of embeddings that other examples read through `tfpar.gather` have the gradient of one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

WORDS, BATCH_SIZE = 12, 8
random = np.random.default_rng(0)


class Centred(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(tfpar.gather(inputs), axis=0)


class CentredByStrategy(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0)


def build(centred: type[layers.Layer]) -> keras.Model:
    words = keras.Input((), dtype="int64")
    model = keras.Model(words, layers.Dense(1)(layers.Dense(4, "tanh")(centred()(layers.Embedding(WORDS, 4)(words)))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def dataset(num_examples: int) -> tf.data.Dataset:
    arrays = random.integers(0, WORDS, num_examples), random.normal(size=(num_examples, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


@pytest.mark.extended
@pytest.mark.parametrize("shard", [None, "optimizer"])
@pytest.mark.parametrize("num_examples", [24, 25, 26], ids=["whole batches", "one in the last", "two in the last"])
def test_a_batch_of_fewer_examples_than_replicas_trains_as_on_one_device(num_examples: int, shard: Any) -> None:
    batches = dataset(num_examples)
    replicas = ["CPU:0", "CPU:1", "CPU:2"]
    small.assert_trains_as_one_device(
        lambda: build(Centred), lambda: batches, lambda: tfpar.Mirrored(replicas, shard=shard)
    )


@pytest.mark.extended
def test_rows_that_the_loss_reads_through_a_gathered_layer_alone_train_as_on_one_device() -> None:
    batches = dataset(26)
    small.assert_trains_as_one_device(
        lambda: build(CentredByStrategy),
        lambda: batches,
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], batch_dependent_layers="gather"),
    )
