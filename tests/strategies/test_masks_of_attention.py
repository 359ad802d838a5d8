"""Keras' attention removes the masks of its inputs, and layers after it compute without them, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def data() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    numbers = rng.integers(1, 20, (24, 6))
    numbers[:, 4:] = 0
    return tf.data.Dataset.from_tensor_slices((numbers, rng.integers(0, 5, (24, 6)))).batch(8)


def attention() -> keras.Model:
    numbers = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(20, 8, mask_zero=True)(numbers)
    attended = keras.layers.MultiHeadAttention(2, 4)(embedded, embedded)
    outputs = keras.layers.Dense(5)(keras.layers.Add()([embedded, attended]))
    return compiled(keras.Model(numbers, outputs))


def two_branches() -> keras.Model:
    """Two values with masks, whose sum has the mask of either."""
    numbers = keras.Input((6,), dtype="int32")
    first = keras.layers.Embedding(20, 8, mask_zero=True)(numbers)
    second = keras.layers.Embedding(20, 8, mask_zero=True)(keras.ops.roll(numbers, 1, 1))
    branches = [keras.layers.Dense(8)(first), keras.layers.Dense(8)(second)]
    return compiled(keras.Model(numbers, keras.layers.Dense(5)(keras.layers.Add()(branches))))


def gated() -> keras.Model:
    """A softmax, which needs all of its input, before an operation on pieces."""
    numbers = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(20, 8)(numbers)
    weights = keras.layers.Dense(8, "softmax")(embedded)
    return compiled(keras.Model(numbers, keras.layers.Dense(5)(weights * keras.layers.Dense(8)(embedded) + 1.0)))


def gated_channels() -> keras.Model:
    """The same after a convolution by filters."""
    numbers = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(20, 8)(numbers)
    weights = keras.layers.Conv1D(8, 3, padding="same", activation="softmax")(embedded)
    filtered = keras.layers.Conv1D(8, 3, padding="same")(embedded)
    return compiled(keras.Model(numbers, keras.layers.Dense(5)(weights * filtered + 1.0)))


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


# The cut of the pipeline is after the attention: both stages read the embedding.
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "pipeline": lambda: tfpar.Pipeline(3, 2, balance=[1, 1, 2]),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
    "replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sum_after_attention_has_no_mask(strategy: str) -> None:
    assert_parity(attention, STRATEGIES[strategy]())


@pytest.mark.parametrize("build", [two_branches, gated, gated_channels], ids=lambda build: build.__name__)
def test_operations_on_pieces_equal_one_device(build: Any) -> None:
    assert_parity(build, tfpar.TensorParallel(2))


def assert_parity(build: Any, strategy: tfpar.Strategy) -> None:
    report = tfpar.check_parity(build, data(), strategy, verbose=False)
    assert report.equal, report.first_difference


def test_a_grouped_convolution_runs_on_each_replica_of_shards() -> None:
    """XLA compiles it on a CPU, and reads weights of its own device only."""

    def build() -> keras.Model:
        inputs = keras.Input((6, 4))
        outputs = keras.layers.Conv1D(8, 3, groups=2, padding="same")(keras.layers.Dense(4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(outputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    rng = np.random.default_rng(0)
    batches = tf.data.Dataset.from_tensors((rng.normal(size=(5, 6, 4)), rng.normal(size=(5, 6, 2)))).repeat(3)
    report = tfpar.check_parity(build, batches, tfpar.Hybrid(tfpar.TensorParallel(2), 2), verbose=False)
    assert report.equal, report.first_difference
