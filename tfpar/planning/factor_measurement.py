"""The gradients that replicas on several hosts compute from sufficient factors, and what that costs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from tfpar.planning.block_measurement import Traced
from tfpar.planning.call_tracing import TracedCall, trace_calls
from tfpar.planning.costs import BlockCost, Factored
from tfpar.strategies.multi_worker.sufficient_factors import factors_of, num_threads, take_less_time

_REPEATS = 5
_BYTES = 4  # of a float32
Product = tuple[int, int, int]  # rows, columns of the first factor, columns of the second one


def with_factors(blocks: Sequence[BlockCost], traced: Traced, num_examples: int, device: str) -> tuple[BlockCost, ...]:
    """Return the costs of blocks with the gradients that replicas on several hosts compute from factors.

    Args:
        blocks: The costs of the layer calls.
        traced: The graph of the model.
        num_examples: Examples of the global batch.
        device: The device. GPUs compute none from factors, as without deterministic operations.

    Example:
        >>> import keras
        >>> from tfpar.planning.block_measurement import measure_blocks, trace_model
        >>> model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
        >>> traced = trace_model(model, "CPU:0", (tf.zeros([4, 512]), tf.zeros([4, 512])))
        >>> (block,) = with_factors(measure_blocks(model, traced, "CPU:0", [4]).costs, traced, 4, "CPU:0")
        >>> block.factored.gradient_bytes, block.factored.row_bytes
        (1048576, 16384)
    """
    if traced.graph is None or "GPU" in device:
        return tuple(blocks)
    uses = collections.Counter(id(one) for call in traced.graph.calls for one in call.variables)
    read = functools.partial(_products_of, uses=uses)
    found = trace_calls(traced.graph, traced.inputs, num_examples, device, read)
    seconds = {product: _seconds(product, device) for product in {one for products in found for one in products}}
    return tuple(
        dataclasses.replace(block, factored=_factored(products, seconds))
        for block, products in zip(blocks, found, strict=True)
    )


def _factored(products: Sequence[Product], seconds: dict[Product, float]) -> Factored:
    return Factored(
        gradient_bytes=sum(_BYTES * num_inputs * num_outputs for _, num_inputs, num_outputs in products),
        row_bytes=sum(_BYTES * rows * (num_inputs + num_outputs) for rows, num_inputs, num_outputs in products),
        product_seconds=sum(seconds[product] for product in products),
    )


def _products_of(traced: TracedCall, uses: collections.Counter[int]) -> list[Product]:
    """Return the products of factors of a layer call: gradients that are one product, without a penalty."""
    found = []
    for weight, gradient in traced.weights:
        factors = factors_of(gradient)
        if factors is None or uses[id(weight)] > 1 or weight.regularizer is not None:
            continue
        num_rows, num_inputs = factors.inputs.shape
        num_outputs = factors.output_gradient.shape[1]
        if num_rows and take_less_time(num_rows, num_inputs, num_outputs, num_threads()):
            found.append((num_rows, num_inputs, num_outputs))
    return found


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
