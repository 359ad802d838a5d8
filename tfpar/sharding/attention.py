"""The sharding rule of attention: by heads.

    x ─┬─► query, key, value of heads 0 1 ─► attention ─► output kernel of heads 0 1 ─┐
       └─► query, key, value of heads 2 3 ─► attention ─► output kernel of heads 2 3 ─┴─ sum

Each device runs the layer itself on its shards of the weights. Only the first one adds the bias of the output. A
dropout mask of the scores is drawn once for all heads.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.graph.ir import Call, Value, run_call
from tfpar.sharding import sharded_values
from tfpar.sharding.elementwise import dropped
from tfpar.sharding.model_sharding import Cut, ShardingRule
from tfpar.sharding.placed_values import Placed

_OUTPUT = "attention_output"
_HEADS_OF_SCORES = 1  # [batch, heads, query, key]


def attention_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of a MultiHeadAttention or GroupQueryAttention call.

    Args:
        call: A layer call.
    """
    layer = call.operation
    leaves = keras.tree.flatten((call.args, dict(call.kwargs)))
    if len(call.outputs) != 1 or layer.activity_regularizer or any(isinstance(leaf, keras.Variable) for leaf in leaves):
        return ()
    if layer.dropout and any(len(value.shape) != 3 for value in _query_and_value(call)):
        return ()  # scores of other ranks have their heads at another axis
    if _has_mask_of_other_heads(call):
        return ()
    if any(variable.path.split("/")[-1] not in ("kernel", "bias") for variable in layer.weights):
        return ()  # LoRA or quantization
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    num_units = layer.num_key_value_heads if is_grouped else layer.num_heads
    cuts: dict[Hashable, Cut] = {}
    for variable in layer.weights:
        part, name = variable.path.split("/")[-2:]
        per_unit = layer.num_repeats if is_grouped and part not in ("key", "value") else 1
        if part == _OUTPUT and name == "kernel":
            cuts[id(variable)] = Cut(0, per_unit)
        elif part != _OUTPUT:
            cuts[id(variable)] = Cut(1 if name == "kernel" else 0, per_unit)
    return (ShardingRule("key-value heads" if is_grouped else "heads", num_units, cuts, None, None, _run),)


def _mask_of_heads(call: Call) -> Any:
    """Return the attention mask of a call if it may have an axis of heads, `[batch, heads, query, key]`, or None."""
    mask = inspect.signature(call.operation.call).bind(*call.args, **call.kwargs).arguments.get("attention_mask")
    ranks = [len(value.shape) for value in _query_and_value(call)]
    may_have_heads = mask is not None and len(mask.shape) > max(ranks, default=0) and mask.shape[_HEADS_OF_SCORES] != 1
    return mask if may_have_heads else None


def _has_mask_of_other_heads(call: Call) -> bool:
    """Return whether the mask of a call has heads but is a constant, or has them at another axis."""
    mask = _mask_of_heads(call)
    is_known = isinstance(mask, Value) and len(mask.shape) == 4 and mask.shape[_HEADS_OF_SCORES] is not None
    return mask is not None and not is_known


def _query_and_value(call: Call) -> list[Value]:
    arguments = [*call.args, call.kwargs.get("query"), call.kwargs.get("value")]
    return [argument for argument in arguments if isinstance(argument, Value)][:2]


def _run(placed: Placed, call: Call, training: bool) -> tf.Tensor:
    layer = call.operation
    factors = _score_factors(placed, call) if layer.dropout and call.training_in(training) else None
    mask_of_heads = _mask_of_heads(call)
    masks = None if mask_of_heads is None else _shards_of_heads(placed, call, placed.whole(mask_of_heads))
    partial = []
    for shard, device in enumerate(placed.devices):
        tensors = {value: _masked_copy(placed, value, shard) for value in dict.fromkeys(call.inputs)}
        if masks is not None:
            tensors[mask_of_heads] = masks[shard]
        with tf.device(device):
            biases = filter(_is_output_bias, layer.weights if shard else ())
            zeros = {id(bias): tf.zeros(bias.shape, bias.dtype) for bias in biases}
            with sharded_memory.as_shards(layer.weights, shard, zeros), _dropping(layer, factors, shard):
                partial.append(run_call(call, tensors, training))
    mask = keras_model.mask_of(partial[0])
    if isinstance(layer, keras.layers.MultiHeadAttention) and keras_model.is_of_keras(type(layer).call):
        for value in dict.fromkeys(call.inputs):  # as the layer does with its inputs
            placed.remove_mask(value)
    output = sharded_values.added(partial, placed.devices)
    with tf.device(placed.devices[0]):
        return keras_model.with_mask(output, mask)


def _is_output_bias(variable: Any) -> bool:
    return bool(variable.path.endswith(f"{_OUTPUT}/bias"))


def _masked_copy(placed: Placed, value: Value, shard: int) -> tf.Tensor:
    tensor, mask = placed.on(value, shard), placed.mask(value)
    with tf.device(placed.devices[shard]):
        return keras_model.with_mask(tensor, None if mask is None else tf.identity(mask))


def _score_factors(placed: Placed, call: Call) -> tuple[tf.Tensor, ...]:
    """Return the dropout factors of the scores for the heads of each shard, drawn as on one device."""
    layer = call.operation
    query, value = map(placed.whole, _query_and_value(call))
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    num_heads = layer.num_query_heads if is_grouped else layer.num_heads
    with tf.device(placed.devices[0]):
        shape = tf.stack([tf.shape(query)[0], num_heads, tf.shape(query)[1], tf.shape(value)[1]])
        factors = _dropout_of(layer)(tf.ones(shape, layer.compute_dtype), training=True)
    return _shards_of_heads(placed, call, tf.stop_gradient(factors))


def _shards_of_heads(placed: Placed, call: Call, scores: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Split a tensor `[batch, heads, query, key]` by heads, like the weights of the layer."""
    sizes = next(weight.value.sizes for weight in call.operation.weights if weight.path.endswith(f"{_OUTPUT}/kernel"))
    return sharded_values.split(scores, sizes, _HEADS_OF_SCORES, placed.devices)


def _dropout_of(layer: Any) -> keras.layers.Dropout:
    return next(sublayer for sublayer in keras_model.all_layers(layer) if type(sublayer) is keras.layers.Dropout)


def _dropping(layer: Any, factors: Sequence[tf.Tensor] | None, shard: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the dropout of a layer applies the given factors of a shard."""
    if factors is None:
        return contextlib.nullcontext()
    factor = factors[shard]
    return mock.patch.object(_dropout_of(layer), "call", lambda inputs, training=False: dropped(inputs, factor))
