"""The gradients that hosts compute from factors, as the planner finds them."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tfpar.planning.block_measurement import measure_blocks, trace_model
from tfpar.planning.factor_measurement import with_factors

WIDTH, BATCH = 512, 4


def build() -> keras.Model:
    """Return a model in which some kernels have factors: of one layer with a penalty, and of one used twice, none."""
    inputs = keras.Input((WIDTH,))
    shared = keras.layers.Dense(WIDTH, name="shared")
    values = keras.layers.Dense(WIDTH, name="plain")(inputs)
    values = keras.layers.Dense(WIDTH, kernel_regularizer="l2", name="penalized")(values)
    values = shared(shared(values))
    values = keras.layers.Dense(2, name="narrow")(values) + values[:, :2]  # the rows are longer than the gradient
    values = keras.layers.Dense(WIDTH, name="of_two")(values)
    return keras.Model(inputs, keras.layers.Dense(2 * WIDTH, name="last")(values))


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = build()
    model.compile("sgd", "mse")
    return model


def batch() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.ones([BATCH, WIDTH]), tf.zeros([BATCH, 2 * WIDTH])


def test_kernels_of_one_use_without_a_penalty_have_factors_where_their_rows_are_shorter(model: keras.Model) -> None:
    traced = trace_model(model, "CPU:0", batch())
    blocks = with_factors(measure_blocks(model, traced, "CPU:0", [BATCH]).costs, model, traced.graph, batch(), "CPU:0")
    planned = {one.name: one.factored.gradient_bytes for one in blocks if one.factored.gradient_bytes}
    assert planned == {"plain": 4 * WIDTH * WIDTH, "last": 4 * WIDTH * 2 * WIDTH}
    plain = next(one for one in blocks if one.name == "plain")
    assert plain.factored.row_bytes == 4 * BATCH * 2 * WIDTH
    assert plain.factored.product_seconds > 0


def test_gpus_sum_gradients_whole(model: keras.Model) -> None:
    traced = trace_model(model, "CPU:0", batch())
    blocks = measure_blocks(model, traced, "CPU:0", [BATCH]).costs
    assert with_factors(blocks, model, traced.graph, batch(), "GPU:0") == tuple(blocks)


def embeddings() -> keras.Model:
    """Return a model of 8 tokens that looks each up in a table of 1000 rows, and the first two in the same table."""
    tokens = keras.Input((8,), dtype="int32")
    table = keras.layers.Embedding(1000, 16, name="table")
    values = keras.layers.Flatten()(table(tokens)) + keras.layers.Flatten()(table(tokens[:, :2]))[:, :1]
    model = keras.Model(tokens, keras.layers.Dense(1)(values))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
def test_rows_of_tables_are_sent_in_place_of_their_gradients(device: str) -> None:
    model, batch = embeddings(), (tf.zeros([BATCH, 8], tf.int32), tf.zeros([BATCH, 1]))
    traced = trace_model(model, "CPU:0", batch)
    assert traced.graph is not None
    blocks = with_factors(measure_blocks(model, traced, "CPU:0", [BATCH]).costs, model, traced.graph, batch, device)
    (factored,) = [one.factored for one in blocks if one.factored.gradient_bytes]
    assert factored.gradient_bytes == 4 * 1000 * 16
    assert factored.row_bytes in (BATCH * (8 + 2) * (4 * 16 + size) for size in (4, 8))
    assert factored.product_seconds == 0
