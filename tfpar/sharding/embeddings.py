"""The sharding rules of Embedding, by rows or columns of its table, and of ReversibleEmbedding, by rows.

rows      each shard looks up its own rows and returns zeros for all others; the results are added up
columns   each shard looks up its columns of each row
reverse   x · table[rows of the shard]ᵀ: the scores of all classes, sharded by class
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar.pipeline.graph.ir import Call
from tfpar.sharding import sharded_values
from tfpar.sharding.model_sharding import Cut, ShardingRule
from tfpar.sharding.placed_values import Placed, layer_mask, weight_shard
from tfpar.sharding.sharded_values import ShardedValue


def embedding_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of an Embedding call.

    Args:
        call: A layer call.
    """
    layer = call.operation
    if len(call.inputs) != 1 or layer.lora_enabled or layer.quantization_mode or layer.activity_regularizer:
        return ()
    table = id(layer.embeddings)
    return (
        ShardingRule(
            "rows of the table", layer.input_dim, {table: Cut(0)}, None, None, functools.partial(_run, by_rows=True)
        ),
        ShardingRule(
            "columns of the table", layer.output_dim, {table: Cut(1)}, None, Cut(-1),
            functools.partial(_run, by_rows=False),
        ),
    )  # fmt: skip


def reversible_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of a ReversibleEmbedding call.

    Args:
        call: A layer call.
    """
    layer = call.operation
    rules = embedding_rules(call)[:1]
    reverse = call.kwargs.get("reverse", call.args[1] if len(call.args) > 1 else False)
    if not reverse or not rules:
        return tuple(dataclasses.replace(rule, run=functools.partial(_look_up, rule.run)) for rule in rules)
    cuts: dict[Hashable, Cut] = (
        {id(layer.embeddings): Cut(0)} if layer.tie_weights else {id(layer.reverse_embeddings): Cut(1)}
    )
    return (ShardingRule("rows of the table, in reverse", layer.input_dim, cuts, None, Cut(-1), _run_reverse),)


def _run(placed: Placed, call: Call, training: bool, *, by_rows: bool) -> Any:
    layer, (value,) = call.operation, call.inputs
    sizes = layer.embeddings.value.sizes
    indices = placed.whole(value)
    numbers = indices.flat_values if isinstance(indices, tf.RaggedTensor) else indices
    with tf.device(placed.devices[0]):
        if numbers.dtype not in (tf.int32, tf.int64):
            numbers = tf.cast(numbers, tf.int32)
        # In Keras 3.15, negative indices count from the end.
        numbers = tf.where(numbers < 0, numbers + tf.cast(layer.input_dim, numbers.dtype), numbers)
    mask = layer_mask(layer, placed, value)
    outputs = []
    for shard, device in enumerate(placed.devices):
        table = weight_shard(layer.embeddings, shard, device)
        with tf.device(device):
            own = tf.identity(numbers)
            if by_rows:
                rows = _rows_of_shard(table, own, shard, sizes)
            else:
                rows = tf.gather(table, own)
            outputs.append(tf.cast(rows, layer.compute_dtype))
    if by_rows:
        total = sharded_values.added(outputs, placed.devices)
        with tf.device(placed.devices[0]):
            return keras_model.with_mask(_in_rows_of(indices, total), mask)
    return ShardedValue(tuple(_in_rows_of(indices, output) for output in outputs), -1, mask)


def _in_rows_of(numbers: Any, embedded: tf.Tensor) -> Any:
    """Return embeddings in the rows of a ragged tensor; for dense indices unchanged."""
    return numbers.with_flat_values(embedded) if isinstance(numbers, tf.RaggedTensor) else embedded


def _rows_of_shard(table: tf.Tensor, numbers: tf.Tensor, shard: int, sizes: tuple[int, ...]) -> tf.Tensor:
    """Look up the rows of a shard, with zeros for other shards; an index outside of the whole table is an error."""
    own = numbers - tf.cast(sum(sizes[:shard]), numbers.dtype)
    is_own = tf.fill(tf.shape(own), True)
    if shard > 0:
        is_own &= own >= 0
    if shard < len(sizes) - 1:
        is_own &= own < sizes[shard]
    rows = tf.gather(table, tf.where(is_own, own, tf.zeros_like(own)))
    return tf.where(is_own[..., None], rows, tf.zeros_like(rows))


def _look_up(run: Any, placed: Placed, call: Call, training: bool) -> tf.Tensor:
    """Look up indices, with the mask that the layer sets in its call (Keras 3.15)."""
    layer, (value,) = call.operation, call.inputs
    rows = run(placed, call, training)
    with tf.device(placed.devices[0]):
        return keras_model.with_mask(rows, keras.layers.Embedding.compute_mask(layer, placed.whole(value)))


def _run_reverse(placed: Placed, call: Call, training: bool) -> ShardedValue:
    layer, (value,) = call.operation, call.inputs
    variable = layer.embeddings if layer.tie_weights else layer.reverse_embeddings

    outputs = []
    for shard, device in enumerate(placed.devices):
        tensor, kernel = placed.on(value, shard), weight_shard(variable, shard, device, layer.compute_dtype)
        with tf.device(device):
            outputs.append(_scores(layer, tf.cast(tensor, layer.compute_dtype), kernel))
    return ShardedValue(tuple(outputs), -1)


def _scores(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    if layer.tie_weights:
        kernel = keras.ops.transpose(kernel)
    if layer.reverse_dtype is not None:
        inputs, kernel = keras.ops.cast(inputs, layer.reverse_dtype), keras.ops.cast(kernel, layer.reverse_dtype)
    scores = keras.ops.matmul(inputs, kernel)
    if layer.logit_soft_cap is not None:
        scores = keras.ops.tanh(scores / layer.logit_soft_cap) * layer.logit_soft_cap
    return scores
