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
