"""The sharding rules that the layer calls of a model offer, by layer class."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras

from tfpar._compat.models import keras_blocks
from tfpar.pipeline.graph.ir import Call, Graph
from tfpar.placement.owners import num_bytes
from tfpar.sharding.attention import attention_rules
from tfpar.sharding.convolutions import (
    CHANNELWISE,
    CONVOLUTIONS,
    DEPTHWISE,
    channelwise_rules,
    convolution_rules,
    depthwise_rules,
    normalization_rules,
)
from tfpar.sharding.dense import dense_rules
from tfpar.sharding.elementwise import elementwise_rules
from tfpar.sharding.embeddings import embedding_rules, reversible_rules
from tfpar.sharding.model_sharding import ModelSharding, Offer, ShardingRule, Weight, plan
from tfpar.sharding.rules import Rules, axes_by_rules

# Only for the class itself, since subclasses may compute something else.
_RULES: dict[type, Callable[[Call], tuple[ShardingRule, ...]]] = {
    keras.layers.Dense: dense_rules,
    keras.layers.EinsumDense: dense_rules,
    keras.layers.Embedding: embedding_rules,
    keras.layers.ReversibleEmbedding: reversible_rules,
    keras.layers.MultiHeadAttention: attention_rules,
    keras.layers.GroupQueryAttention: attention_rules,
    keras.layers.BatchNormalization: normalization_rules,
    **dict.fromkeys(CONVOLUTIONS, convolution_rules),
    **dict.fromkeys(DEPTHWISE, depthwise_rules),
    **dict.fromkeys(CHANNELWISE, channelwise_rules),
}


def sharding_of(
    model: keras.Model,
    graph: Graph,
    num_shards: int,
    user_rules: Rules | None,
    calls: Sequence[Call] | None = None,
    whole: Mapping[int, str] = MappingProxyType({}),
) -> ModelSharding:
    """Choose how a model, or some of its layer calls, is sharded.

    Args:
        model: A model with built layers.
        graph: Its layer calls.
        num_shards: The number of shards.
        user_rules: The user's rules, or None for an automatic choice.
        calls: The layer calls to shard. Defaults to all.
        whole: Why some variables must stay whole, by the variable's `id`.

    Raises:
        ValueError: If a rule does not fit the model.
    """
    weights: dict[Hashable, Weight] = {}
    for variable in model.variables:
        reason = _whole_because(variable) or whole.get(id(variable), "")
        weights[id(variable)] = Weight(variable.path, tuple(variable.shape), num_bytes(variable), reason)
    wanted = None if user_rules is None else axes_by_rules(user_rules, weights)
    if wanted is not None and calls is not None:
        elsewhere = _read_by(graph.calls) - _read_by(calls)
        wanted = {key: axis for key, axis in wanted.items() if key not in elsewhere}
    return plan([_offer(call) for call in (graph.calls if calls is None else calls)], weights, num_shards, wanted)


def _read_by(calls: Sequence[Call]) -> set[Hashable]:
    return {id(variable) for call in calls for variable in call.variables}


def _offer(call: Call) -> Offer:
    find = _RULES.get(keras_blocks.class_of(call.operation), elementwise_rules)
    return Offer(
        call.name,
        tuple(call.inputs),
        call.outputs,
        tuple(map(id, call.variables)),
        find(call),
        _call_whole_because(call),
        _num_positions(call),
    )


def _num_positions(call: Call) -> int:
    """Return how many outputs of a layer call are computed with the same weights. Unknown sizes count as 1."""
    if not call.outputs or isinstance(call.operation, keras.layers.Embedding):
        return 1  # a lookup, not a multiplication
    elements = [size or 1 for size in call.outputs[0].shape[1:]]
    axis = getattr(call.operation, "data_format", None) == "channels_first" and len(elements) > 1
    return math.prod(elements) // (elements[0 if axis else -1] if elements else 1)


def _call_whole_because(call: Call) -> str:
    """Return why a call without sharding rules is not sharded."""
    layer = call.operation
    known = keras_blocks.class_of(layer)
    if known not in _RULES:
        return f"layers of the class {type(layer).__name__} are not sharded"
    names = {variable.path.split("/")[-1] for variable in layer.weights}
    is_attention = known in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    settings = {
        "with LoRA": getattr(layer, "lora_enabled", False),
        "quantized": getattr(layer, "quantization_mode", None),
        "with LoRA or quantized": is_attention and not names <= {"kernel", "bias"},
        "with activity_regularizer": layer.activity_regularizer,
        "with groups": getattr(layer, "groups", 1) != 1,
        'with padding="causal"': getattr(layer, "padding", None) == "causal",
        "with renorm": getattr(layer, "renorm", False),
        "with a mask": any("mask" in name and value is not None for name, value in call.kwargs.items()),
        "with several inputs": len(call.inputs) > 1 and not is_attention,
        "with several outputs": len(call.outputs) > 1,
    }
    how = next((text for text, is_set in settings.items() if is_set), "of this kind")
    return f"a {type(layer).__name__} layer {how} is not sharded"


def _whole_because(variable: Any) -> str:
    if variable.constraint is not None:
        return "its constraint needs all of it"
    return "it is overwritten by its gradient" if variable.overwrite_with_gradient else ""
