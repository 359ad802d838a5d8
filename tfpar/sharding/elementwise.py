"""Sharding rules of elementwise layer calls, which run on shards of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar.pipeline.graph.ir import Call, Value, run_call
from tfpar.sharding import sharded_values
from tfpar.sharding.model_sharding import Cut, ShardingRule
from tfpar.sharding.placed_values import Placed, layer_mask
from tfpar.sharding.sharded_values import ShardedValue

_ACTIVATIONS = {
    "celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu", "hard_tanh",
    "leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid",
    "silu", "soft_shrink", "softplus", "softsign", "sparse_plus", "sparse_sigmoid", "squareplus", "tanh",
    "tanh_shrink", "threshold",
}  # fmt: skip
_FUNCTIONS = {getattr(keras.activations, name) for name in _ACTIVATIONS}
_LAYERS = (
    *(keras.layers.Activation, keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU, keras.layers.Identity),
    *(keras.layers.Dropout, keras.layers.Add, keras.layers.Subtract, keras.layers.Multiply, keras.layers.Average),
    *(keras.layers.Maximum, keras.layers.Minimum),
)
# Class names of operations of `keras.ops`.
_OPERATIONS = {
    "Absolute", "Add", "Cast", "Celu", "Cos", "Divide", "Elu", "Erf",
    "Exp", "Gelu", "HardShrink", "HardSigmoid", "HardSilu", "HardTanh", "LeakyRelu", "Log",
    "Log1p", "LogSigmoid", "Maximum", "Minimum", "Multiply", "Negative", "Power", "Reciprocal",
    "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid", "Sign", "Silu", "Sin",
    "SoftShrink", "Softplus", "Softsign", "SparsePlus", "Sqrt", "Square", "Squareplus", "Subtract",
    "Tanh", "TanhShrink", "Threshold", "TrueDivide",
}  # fmt: skip


def is_elementwise(activation: Any) -> bool:
    """Return whether an activation is an elementwise function of Keras."""
    return activation in _FUNCTIONS


def activates_shards(layer: Any) -> bool:
    """Return whether a layer can apply its activation to each shard of its output.

    Args:
        layer: A layer whose attribute `activation` may be None.
    """
    return layer.activation is None or is_elementwise(layer.activation)


def activated(outputs: Sequence[tf.Tensor], axis: int, placed: Placed, call: Call) -> ShardedValue | tf.Tensor:
    """Apply the activation of a layer to its sharded output; gather the output first if the activation needs all of it.

    Args:
        outputs: The shards of the output.
        axis: The sharded axis, counted from the end.
        placed: The values of the run.
        call: A call of a layer with a single input.
    """
    layer, (value,) = call.operation, call.inputs
    mask = layer_mask(layer, placed, value)
    if not activates_shards(layer):
        whole = sharded_values.gathered(outputs, axis, placed.devices)
        with tf.device(placed.devices[0]):
            return keras_model.with_mask(layer.activation(whole), mask)
    activations = []
    for output, device in zip(outputs, placed.devices, strict=True):
        with tf.device(device):
            activations.append(output if layer.activation is None else layer.activation(output))
    return ShardedValue(tuple(activations), axis, mask)


def elementwise_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of an elementwise call, one for each axis but the first.

    Args:
        call: A layer call.
    """
    if not call.inputs or not _runs_on_shards(call):
        return ()
    rank = len(call.outputs[0].shape)
    if any(len(value.shape) != rank for value in call.inputs):
        return ()
    return tuple(ShardingRule("elements", None, {}, axis, Cut(axis), _run) for axis in range(-1, -rank, -1))


def _runs_on_shards(call: Call) -> bool:
    operation = call.operation
    if len(call.outputs) != 1 or call.variables:
        return isinstance(operation, keras.layers.Dropout) and len(call.outputs) == 1 and _is_plain_dropout(call)
    if not isinstance(operation, keras.Layer):
        leaves = keras.tree.flatten((call.args, dict(call.kwargs)))
        is_known = keras_model.is_of_keras(type(operation)) and type(operation).__name__ in _OPERATIONS
        return is_known and all(isinstance(leaf, Value | int | float | bool | str | None) for leaf in leaves)
    if type(operation) not in _LAYERS or operation.activity_regularizer:
        return False
    if isinstance(operation, keras.layers.Activation):
        return is_elementwise(operation.activation)
    return not isinstance(operation, keras.layers.Dropout) or _is_plain_dropout(call)


def _is_plain_dropout(call: Call) -> bool:
    layer = call.operation
    return type(layer) is keras.layers.Dropout and not layer.noise_shape and not layer.activity_regularizer


def _run(placed: Placed, call: Call, training: bool) -> ShardedValue:
    """Run a call on the shards of its inputs."""
    held = [placed.tensors[value] for value in call.inputs]
    axis, outputs = held[0].axis, []
    drops = isinstance(call.operation, keras.layers.Dropout) and call.training_in(training)
    if drops and call.operation.rate > 0:
        factors = _dropout_factors(placed, call, held[0])
    for shard, device in enumerate(placed.devices):
        with tf.device(device):
            tensors = {value: sharded.tensors[shard] for value, sharded in zip(call.inputs, held, strict=True)}
            if drops and call.operation.rate > 0:
                outputs.append(dropped(tensors[call.inputs[0]], factors[shard]))
            else:
                outputs.append(run_call(call, tensors, training))
    with tf.device(placed.devices[0]):
        return ShardedValue(tuple(outputs), axis, _mask(call, [sharded.mask for sharded in held]))


def _mask(call: Call, masks: list[Any]) -> Any:
    """Return the Keras mask of the output of a call, or None."""
    if not getattr(call.operation, "supports_masking", False):
        return None
    is_merge = isinstance(call.args[0] if call.args else None, list | tuple)
    return call.operation.compute_mask([None] * len(masks), masks) if is_merge else masks[0]


def _dropout_factors(placed: Placed, call: Call, held: ShardedValue) -> tuple[tf.Tensor, ...]:
    """Return the dropout factors of each shard, drawn for the whole value as on one device."""
    sizes = [int(shard.shape[held.axis]) for shard in held.tensors]
    first = held.tensors[0]
    with tf.device(placed.devices[0]):
        shape = tf.unstack(tf.shape(first))
        shape[held.axis] = tf.constant(sum(sizes))
        ones = tf.ones(tf.stack(shape), first.dtype)
        factors = run_call(call, {call.inputs[0]: ones}, True)
    return sharded_values.split(tf.stop_gradient(factors), sizes, held.axis, placed.devices)


def dropped(shard: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Apply dropout factors to a shard.

    Args:
        shard: A shard of a value.
        factor: The factor of each element, 0 for dropped ones.
    """
    # Like TensorFlow, drop NaN as well: NaN * 0 is NaN.
    return tf.where(factor > 0, shard * factor, tf.zeros_like(shard))
