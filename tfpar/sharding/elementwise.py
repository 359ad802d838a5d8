"""Layer calls that compute each element of a value from the same element of their inputs, and so run on pieces."""

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
# Of `keras.ops`, by the names of their classes.
_OPERATIONS = {
    "Absolute", "Add", "Cast", "Celu", "Cos", "Divide", "Elu", "Erf",
    "Exp", "Gelu", "HardShrink", "HardSigmoid", "HardSilu", "HardTanh", "LeakyRelu", "Log",
    "Log1p", "LogSigmoid", "Maximum", "Minimum", "Multiply", "Negative", "Power", "Reciprocal",
    "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid", "Sign", "Silu", "Sin",
    "SoftShrink", "Softplus", "Softsign", "SparsePlus", "Sqrt", "Square", "Squareplus", "Subtract",
    "Tanh", "TanhShrink", "Threshold", "TrueDivide",
}  # fmt: skip


def is_elementwise(activation: Any) -> bool:
    """Return whether an activation of Keras computes each element from the same element of its input."""
    return activation in _FUNCTIONS


def activates_pieces(layer: Any) -> bool:
    """Return whether a layer can activate each piece of its output separately.

    Args:
        layer: A layer with an activation, or with None for none.
    """
    return layer.activation is None or is_elementwise(layer.activation)


def activated(outputs: Sequence[tf.Tensor], axis: int, placed: Placed, call: Call) -> ShardedValue | tf.Tensor:
    """Return the output of a layer call after its activation, in pieces if that treats elements separately.

    Args:
        outputs: The piece of each shard before the activation.
        axis: The divided axis, from the end.
        placed: The values of the run.
        call: A call of a layer with one input.
    """
    layer, (value,) = call.operation, call.inputs
    mask = layer_mask(layer, placed, value)
    if not activates_pieces(layer):
        whole = sharded_values.gathered(outputs, axis, placed.devices)
        with tf.device(placed.devices[0]):
            return keras_model.with_mask(layer.activation(whole), mask)
    found = []
    for output, device in zip(outputs, placed.devices, strict=True):
        with tf.device(device):
            found.append(output if layer.activation is None else layer.activation(output))
    return ShardedValue(tuple(found), axis, mask)


def elementwise_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules to run a call on the pieces of its inputs, for each axis that may be divided.

    Args:
        call: A layer call.
    """
    if not call.inputs or not _runs_on_pieces(call):
        return ()
    rank = len(call.outputs[0].shape)
    if any(len(value.shape) != rank for value in call.inputs):
        return ()
    return tuple(ShardingRule("elements", None, {}, axis, Cut(axis), _run) for axis in range(-1, -rank, -1))


def _runs_on_pieces(call: Call) -> bool:
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
    """Run a call on each device, with the pieces of its inputs."""
    held = [placed.tensors[value] for value in call.inputs]
    axis, outputs = held[0].axis, []
    drops = isinstance(call.operation, keras.layers.Dropout) and call.training_in(training)
    if drops and call.operation.rate > 0:
        factors = _dropout_factors(placed, call, held[0])
    for shard, device in enumerate(placed.devices):
        with tf.device(device):
            tensors = {value: one.tensors[shard] for value, one in zip(call.inputs, held, strict=True)}
            if drops and call.operation.rate > 0:
                outputs.append(dropped(tensors[call.inputs[0]], factors[shard]))
            else:
                outputs.append(run_call(call, tensors, training))
    with tf.device(placed.devices[0]):
        return ShardedValue(tuple(outputs), axis, _mask(call, [one.mask for one in held]))


def _mask(call: Call, masks: list[Any]) -> Any:
    """Return the Keras mask of the output of a call, for those of its inputs; None for none."""
    if not getattr(call.operation, "supports_masking", False):
        return None
    is_merge = isinstance(call.args[0] if call.args else None, list | tuple)
    return call.operation.compute_mask([None] * len(masks), masks) if is_merge else masks[0]


def _dropout_factors(placed: Placed, call: Call, held: ShardedValue) -> tuple[tf.Tensor, ...]:
    """Return the factors of a dropout for each piece: drawn for the whole value, as on one device."""
    sizes = [int(piece.shape[held.axis]) for piece in held.tensors]
    first = held.tensors[0]
    with tf.device(placed.devices[0]):
        shape = tf.unstack(tf.shape(first))
        shape[held.axis] = tf.constant(sum(sizes))
        ones = tf.ones(tf.stack(shape), first.dtype)
        factors = run_call(call, {call.inputs[0]: ones}, True)
    return sharded_values.divided(tf.stop_gradient(factors), sizes, held.axis, placed.devices)


def dropped(piece: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return a piece after a dropout.

    Args:
        piece: A piece.
        factor: For each element 0, or the factor of those that stay.
    """
    # As in TensorFlow: an element that is not a number is dropped too.
    return tf.where(factor > 0, piece * factor, tf.zeros_like(piece))
