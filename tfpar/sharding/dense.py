"""The sharding rules of Dense and EinsumDense: by columns or by rows of the kernel.

columns    x [batch, in] ──► x · kernel[:, shard]   ──► shard of y
rows       shard of x    ──► x · kernel[shard, :]   ──► sum over shards ──► y, with the bias added once
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar.pipeline.graph.ir import Call
from tfpar.sharding import sharded_values
from tfpar.sharding.elementwise import activated, activates_shards
from tfpar.sharding.model_sharding import Cut, ShardingRule
from tfpar.sharding.placed_values import Placed, layer_mask, weight_shard
from tfpar.sharding.sharded_values import ShardedValue

# A Dense layer with this many outputs per input, or more, is sharded by columns even if its input is sharded.
WIDE_OUTPUT = 4


def dense_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of a Dense or EinsumDense call.

    Args:
        call: A layer call.
    """
    layer = call.operation
    if len(call.inputs) != 1 or not _is_plain(layer):
        return ()
    equation = "...c,cd->...d" if isinstance(layer, keras.layers.Dense) else layer.equation
    labels, rest = equation.replace(" ", "").split(",")
    kernel, output = rest.split("->")
    bias = "d" if isinstance(layer, keras.layers.Dense) else (layer.bias_axes or "")
    columns = [label for label in kernel if label in output and label not in labels]
    rows = [label for label in kernel if label in labels and label not in output]
    rules = []
    for label in rows:
        axis = _axis_from_end(labels, label)
        if axis is not None:
            run = functools.partial(_run_rows, equation, axis)
            rules.append(
                ShardingRule(
                    "rows", _size(layer, kernel, label), {id(layer.kernel): Cut(kernel.index(label))}, axis, None, run
                )
            )
    for label in columns:
        axis = _axis_from_end(output, label)
        if axis is not None:
            cuts: dict[Hashable, Cut] = {id(layer.kernel): Cut(kernel.index(label))}
            if layer.bias is not None and label in bias:
                cuts[id(layer.bias)] = Cut(output.index(label) - min(map(output.index, bias)))  # as the output
            run = functools.partial(_run_columns, equation, axis, label in bias)
            result = Cut(axis) if activates_shards(layer) else None
            rules.append(ShardingRule("columns", _size(layer, kernel, label), cuts, None, result, run))
    # Adding up outputs for many classes takes more memory and time than sending the inputs.
    is_wide = isinstance(layer, keras.layers.Dense) and layer.kernel.shape[1] >= WIDE_OUTPUT * layer.kernel.shape[0]
    return tuple(reversed(rules)) if is_wide else tuple(rules)


def _size(layer: Any, kernel: str, label: str) -> int:
    return int(layer.kernel.shape[kernel.index(label)])


def _axis_from_end(labels: str, label: str) -> int | None:
    """Return the axis of a label counted from the end, or None for a label before an ellipsis."""
    after = labels.split("...")[-1]
    return after.index(label) - len(after) if label in after else None


def _is_plain(layer: Any) -> bool:
    """Return whether a layer only uses its kernel and bias: no LoRA, quantization or added loss."""
    return not (layer.lora_enabled or layer.quantization_mode or layer.activity_regularizer)


def _multiply(layer: Any, equation: str, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    inputs = tf.cast(inputs, layer.compute_dtype)
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(inputs, kernel)
    return keras.ops.einsum(equation, inputs, kernel)


def _run_columns(
    equation: str, axis: int, shards_bias: bool, placed: Placed, call: Call, training: bool
) -> ShardedValue | tf.Tensor:
    layer, (value,) = call.operation, call.inputs

    outputs = []
    for shard, device in enumerate(placed.devices):
        tensor, kernel = placed.on(value, shard), weight_shard(layer.kernel, shard, device, layer.compute_dtype)
        bias = None
        if layer.bias is not None:
            bias = (
                weight_shard(layer.bias, shard, device) if shards_bias else _copy(layer.bias, placed.devices[0], device)
            )
        with tf.device(device):
            output = _multiply(layer, equation, tensor, kernel)
            outputs.append(output if bias is None else keras.ops.add(output, tf.cast(bias, layer.compute_dtype)))
    return activated(outputs, axis, placed, call)


def _copy(variable: Any, home: str, device: str) -> tf.Tensor:
    with tf.device(home):
        value = tf.convert_to_tensor(variable)
    return sharded_values.sent(value, home, device)


def _run_rows(equation: str, axis: int, placed: Placed, call: Call, training: bool) -> tf.Tensor:
    layer, (value,) = call.operation, call.inputs
    held = placed.sharded(value, axis, layer.kernel.value.sizes)
    partial = []
    for shard, (device, tensor) in enumerate(zip(placed.devices, held.tensors, strict=True)):
        with tf.device(device):
            partial.append(
                _multiply(layer, equation, tensor, weight_shard(layer.kernel, shard, device, layer.compute_dtype))
            )
    output = sharded_values.added(partial, placed.devices)
    with tf.device(placed.devices[0]):
        if layer.bias is not None:
            output = keras.ops.add(output, tf.cast(tf.convert_to_tensor(layer.bias), layer.compute_dtype))
        if layer.activation is not None:
            output = layer.activation(output)
        return keras_model.with_mask(output, layer_mask(layer, placed, value))
