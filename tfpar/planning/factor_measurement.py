"""The gradients that replicas on several hosts compute from sufficient factors, and what that costs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model, random_state
from tfpar.pipeline.graph.tracing import Graph
from tfpar.planning.costs import BlockCost, Factored
from tfpar.strategies.multi_worker import sufficient_factors

_REPEATS = 5
_BYTES = 4  # of a float32
Product = tuple[int, int, int]  # rows, columns of the first factor, columns of the second one


def with_factors(
    blocks: Sequence[BlockCost], model: keras.Model, graph: Graph, batch: Any, device: str
) -> tuple[BlockCost, ...]:
    """Return the costs of blocks with the gradients that replicas on several hosts compute from factors.

    Args:
        blocks: The costs of the layer calls of a model.
        model: The model.
        graph: Its layer calls.
        batch: The global batch, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.
        device: The device. GPUs compute none from factors, as without deterministic operations.

    Example:
        >>> from tfpar.planning.block_measurement import measure_blocks, trace_model
        >>> model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
        >>> model.compile("sgd", "mse")
        >>> batch = tf.zeros([4, 512]), tf.zeros([4, 512])
        >>> traced = trace_model(model, "CPU:0", batch)
        >>> (block,) = measure_blocks(model, traced, "CPU:0", [4]).costs
        >>> with_factors([block], model, traced.graph, batch, "CPU:0")[0].factored.row_bytes
        16384
    """
    if "GPU" in device:
        return tuple(blocks)
    products = _products(model, batch)
    seconds = {product: _seconds(product, device) for product in set(products.values())}
    found: list[BlockCost] = []
    for block, call in zip(blocks, graph.calls, strict=True):
        own = [products.pop(id(one)) for one in call.variables if id(one) in products]
        found.append(dataclasses.replace(block, factored=_factored(own, seconds)))
    return tuple(found)


def _factored(products: Sequence[Product], seconds: Mapping[Product, float]) -> Factored:
    return Factored(
        gradient_bytes=sum(_BYTES * num_inputs * num_outputs for _, num_inputs, num_outputs in products),
        row_bytes=sum(_BYTES * rows * (num_inputs + num_outputs) for rows, num_inputs, num_outputs in products),
        product_seconds=sum(seconds[product] for product in products),
    )


@random_state.preserved_random_state()
def _products(model: keras.Model, batch: Any) -> dict[int, Product]:
    """Return the products of factors by the `id` of the weight, from the graph of a step of any number of examples."""
    found: dict[int, Product] = {}
    num_examples, weights = int(data.num_rows(batch)), model.trainable_variables

    def trace(batch: Any) -> None:
        inputs, targets, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = keras_model.call_model(model, inputs, training=True)
            loss = keras_model.compute_loss(model, inputs, targets, outputs, sample_weight, training=True)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            factors = sufficient_factors.sufficient_factors_of(gradient, num_examples, sufficient_factors.num_threads())
            if factors is not None:
                found[id(weight)] = (sufficient_factors.num_rows_of(factors, num_examples), *gradient.shape)

    specs = tf.nest.map_structure(_of_any_size, batch)
    tf.function(trace, autograph=False).get_concrete_function(specs)
    return found


def _of_any_size(leaf: Any) -> Any:
    """Return the type of a tensor with any number of examples."""
    if not isinstance(leaf, tf.Tensor):
        return None if leaf is None else tf.type_spec_from_value(leaf)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _seconds(product: Product, device: str) -> float:
    num_rows, num_inputs, num_outputs = product
    with tf.device(device):
        first, second = tf.ones([num_rows, num_inputs]), tf.ones([num_rows, num_outputs])
        multiply = tf.function(lambda: tf.reduce_sum(tf.matmul(first, second, transpose_a=True)), autograph=False)
        multiply().numpy()
        found = []
        for _ in range(_REPEATS):
            began_seconds = time.perf_counter()
            multiply().numpy()
            found.append(time.perf_counter() - began_seconds)
    return statistics.median(found)
