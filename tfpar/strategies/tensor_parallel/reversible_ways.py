"""The ways to divide a ReversibleEmbedding, whose table is also the kernel of the last layer: by rows of the table.

numbers   each shard looks up the numbers of its own rows; the results are added
reverse   x · table[rows of the shard]ᵀ gives the scores of these rows: pieces of the scores of all classes
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_model
from tfpar.pipeline.graph.ir import Call
from tfpar.reduction.row_scores import RowScores
from tfpar.strategies.tensor_parallel.embedding_ways import embedding_ways
from tfpar.strategies.tensor_parallel.layout import Cut, Way
from tfpar.strategies.tensor_parallel.pieces import Pieces
from tfpar.strategies.tensor_parallel.shards import Placed, weight_piece


def reversible_ways(call: Call) -> tuple[Way, ...]:
    """Return the ways to divide a call of a ReversibleEmbedding layer.

    Args:
        call: A layer call.
    """
    layer = call.operation
    ways = embedding_ways(call)[:1]
    reverse = call.kwargs.get("reverse", call.args[1] if len(call.args) > 1 else False)
    if not reverse or not ways:
        return tuple(dataclasses.replace(way, run=functools.partial(_look_up, way.run)) for way in ways)
    cuts: dict[Hashable, Cut] = (
        {id(layer.embeddings): Cut(0)} if layer.tie_weights else {id(layer.reverse_embeddings): Cut(1)}
    )
    return (Way("rows of the table, in reverse", layer.input_dim, cuts, None, Cut(-1), _run_reverse),)


def _look_up(run: Any, placed: Placed, call: Call, training: bool) -> tf.Tensor:
    """Look up numbers, with the mask that the layer sets in its call (Keras 3.15)."""
    layer, (value,) = call.operation, call.inputs
    rows = run(placed, call, training)
    with tf.device(placed.devices[0]):
        return keras_model.with_mask(rows, keras.layers.Embedding.compute_mask(layer, placed.whole(value)))


def _run_reverse(placed: Placed, call: Call, training: bool) -> Pieces:
    layer, (value,) = call.operation, call.inputs
    variable = layer.embeddings if layer.tie_weights else layer.reverse_embeddings

    def of_shard(given: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        given = tf.cast(given, layer.compute_dtype)
        if layer.tie_weights:
            kernel = keras.ops.transpose(kernel)
        if layer.reverse_dtype is not None:
            given, kernel = (keras.ops.cast(one, layer.reverse_dtype) for one in (given, kernel))
        scores = keras.ops.matmul(given, kernel)
        if layer.logit_soft_cap is not None:
            scores = keras.ops.tanh(scores / layer.logit_soft_cap) * layer.logit_soft_cap
        return scores

    outputs, computed = [], []
    for shard, device in enumerate(placed.devices):
        given, kernel = placed.on(value, shard), weight_piece(variable, shard, device, layer.compute_dtype)
        with tf.device(device):
            outputs.append(of_shard(given, kernel))
        computed.append(RowScores(given, (kernel,), of_shard))
    return Pieces(tuple(outputs), -1, computed=computed)
