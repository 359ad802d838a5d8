"""The gradients of which replicas on several hosts send rows: products of factors, and those of embeddings."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model, random_state
from tfpar.pipeline.graph.tracing import Graph
from tfpar.planning.costs import BlockCost, Factored
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies.multi_worker import sufficient_factors

_REPEATS = 5
_BYTES = 4  # of a float32


class Product(NamedTuple):
    """A gradient that is the product of two factors with some rows for the global batch."""

    num_rows: int
    num_inputs: int
    num_outputs: int

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradient."""
        return _BYTES * self.num_inputs * self.num_outputs

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows of both factors."""
        return _BYTES * self.num_rows * (self.num_inputs + self.num_outputs)


class Lookups(NamedTuple):
    """The rows of a table of embeddings that the examples of the global batch look up."""

    gradient_bytes: int
    row_bytes: int


def with_factors(
    blocks: Sequence[BlockCost], model: keras.Model, graph: Graph, batch: Any, device: str
) -> tuple[BlockCost, ...]:
    """Return the costs of blocks with the gradients of which replicas on several hosts send rows.

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
    rows = _rows_of_gradients(model, batch, multiplies="GPU" not in device)
    seconds = {one: _seconds(one, device) for one in set(rows.values()) if isinstance(one, Product)}
    found: list[BlockCost] = []
    for block, call in zip(blocks, graph.calls, strict=True):
        own = [rows.pop(id(one)) for one in call.variables if id(one) in rows]
        found.append(dataclasses.replace(block, factored=_factored(own, seconds)))
    return tuple(found)


def _factored(rows: Sequence[Product | Lookups], seconds: Mapping[Product, float]) -> Factored:
    return Factored(
        gradient_bytes=sum(one.gradient_bytes for one in rows),
        row_bytes=sum(one.row_bytes for one in rows),
        product_seconds=sum(seconds[one] for one in rows if isinstance(one, Product)),
    )


@random_state.preserved_random_state()
def _rows_of_gradients(model: keras.Model, batch: Any, *, multiplies: bool) -> dict[int, Product | Lookups]:
    """Return the rows by the `id` of the weight, from the graph of a step of any number of examples."""
    found: dict[int, Product | Lookups] = {}
    num_examples, weights = int(data.num_rows(batch)), model.trainable_variables

    def trace(batch: Any) -> None:
        inputs, targets, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = keras_model.call_model(model, inputs, training=True)
            loss = keras_model.compute_loss(model, inputs, targets, outputs, sample_weight, training=True)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            rows: Product | Lookups | None = None
            if isinstance(gradient, tf.IndexedSlices):
                rows = _lookups(weight, gradient, num_examples)
            elif multiplies:
                rows = _product(gradient, num_examples)
            if rows is not None:
                found[id(weight)] = rows

    specs = tf.nest.map_structure(_of_any_size, batch)
    tf.function(trace, autograph=False).get_concrete_function(specs)
    return found


def _product(gradient: Any, num_examples: int) -> Product | None:
    factors = sufficient_factors.sufficient_factors_of(gradient, num_examples, sufficient_factors.num_threads())
    if factors is None:
        return None
    num_rows = sufficient_factors.num_rows_of(factors.inputs, num_examples)
    assert num_rows is not None, "factors of an unknown number of rows are summed whole"
    return Product(num_rows, *gradient.shape)


def _lookups(table: keras.Variable, gradient: tf.IndexedSlices, num_examples: int) -> Lookups | None:
    """Return the rows of all lookups in a table; None where the shapes do not determine them."""
    op = gradient.indices.op
    of_lookups = list(op.inputs)[:-1] if op.type == "ConcatV2" else [gradient.indices]
    counts = [sufficient_factors.num_rows_of(one, num_examples) for one in of_lookups]
    if None in counts:
        return None
    row_bytes = num_bytes(table) // table.shape[0] + gradient.indices.dtype.size
    return Lookups(num_bytes(table), row_bytes * sum(filter(None, counts)))


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
