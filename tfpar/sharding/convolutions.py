"""Sharding rules of convolutions, by filters or by input channels, and of layers that treat channels separately.

x ──► convolution by filters ──► normalization, pooling of each channel ──► convolution by channels ──► sum
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.graph.ir import Call, run_call
from tfpar.sharding import sharded_values
from tfpar.sharding.dense import WIDE_OUTPUT
from tfpar.sharding.elementwise import activated, activates_shards
from tfpar.sharding.model_sharding import Cut, ShardingRule, even_sizes
from tfpar.sharding.placed_values import Placed, layer_mask, weight_shard
from tfpar.sharding.sharded_values import ShardedValue

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
CHANNELWISE = (
    *(keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D),
    *(keras.layers.AveragePooling1D, keras.layers.AveragePooling2D, keras.layers.AveragePooling3D),
    *(keras.layers.GlobalMaxPooling1D, keras.layers.GlobalMaxPooling2D, keras.layers.GlobalMaxPooling3D),
    *(keras.layers.GlobalAveragePooling1D, keras.layers.GlobalAveragePooling2D, keras.layers.GlobalAveragePooling3D),
    *(keras.layers.ZeroPadding1D, keras.layers.ZeroPadding2D, keras.layers.ZeroPadding3D),
    *(keras.layers.UpSampling1D, keras.layers.UpSampling2D, keras.layers.UpSampling3D),
)


def convolution_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of a convolution.

    Args:
        call: A layer call.
    """
    layer = call.operation
    if layer.groups != 1 or layer.padding == "causal" or layer.lora_enabled or layer.activity_regularizer:
        return ()
    channels, (inputs, filters) = _channel_axis(layer), layer.kernel.shape[-2:]
    rank = len(layer.kernel.shape)
    cuts: dict[Hashable, Cut] = {id(layer.kernel): Cut(rank - 1)}
    if layer.bias is not None:
        cuts[id(layer.bias)] = Cut(0)
    rules = (
        ShardingRule("channels", int(inputs), {id(layer.kernel): Cut(rank - 2)}, channels, None, _run_channels),
        ShardingRule(
            "filters", int(filters), cuts, None, Cut(channels) if activates_shards(layer) else None, _run_filters
        ),
    )
    # Adding up many outputs takes longer than sending the inputs, as in Dense.
    return rules[::-1] if filters >= WIDE_OUTPUT * inputs and max(layer.strides) == 1 else rules


def depthwise_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rule of a depthwise convolution: by channels.

    Args:
        call: A layer call.
    """
    layer = call.operation
    if layer.activity_regularizer:
        return ()
    channels, (inputs, multiplier) = _channel_axis(layer), map(int, layer.kernel.shape[-2:])
    cuts: dict[Hashable, Cut] = {id(layer.kernel): Cut(len(layer.kernel.shape) - 2)}
    if layer.bias is not None:
        cuts[id(layer.bias)] = Cut(0, multiplier)
    gives = Cut(channels, multiplier) if activates_shards(layer) else None
    return (ShardingRule("channels", inputs, cuts, channels, gives, _run_depthwise),)


def channelwise_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rule of a layer without weights that treats channels separately, such as pooling.

    Args:
        call: A layer call.
    """
    layer = call.operation
    if len(call.inputs) != 1 or layer.activity_regularizer:
        return ()
    takes = _channel_axis(layer, len(call.inputs[0].shape))
    gives = -1 if len(call.outputs[0].shape) == 2 else takes
    return (ShardingRule("channels", None, {}, takes, Cut(gives), functools.partial(_run_channelwise, gives)),)


def normalization_rules(call: Call) -> tuple[ShardingRule, ...]:
    """Return the sharding rule of BatchNormalization: by channels, with moving statistics on the first device.

    Args:
        call: A layer call.
    """
    layer = call.operation
    rank = len(call.inputs[0].shape)
    if len(call.inputs) != 1 or layer.renorm or layer.activity_regularizer or call.kwargs.get("mask") is not None:
        return ()
    axis = layer.axis % rank - rank
    cuts: dict[Hashable, Cut] = {id(weight): Cut(0) for weight in (layer.gamma, layer.beta) if weight is not None}
    size = int(call.inputs[0].shape[axis] or 0)
    return (ShardingRule("channels", size, cuts, axis, Cut(axis), functools.partial(_run_normalization, axis)),)


def _channel_axis(layer: Any, rank: int | None = None) -> int:
    """Return the axis of the channels, counted from the end."""
    if getattr(layer, "data_format", "channels_last") == "channels_last":
        return -1
    return 1 - (rank or layer.rank + 2)


def _run_filters(placed: Placed, call: Call, training: bool) -> Any:
    (value,) = call.inputs
    return _outputs(placed, call, [placed.on(value, shard) for shard in range(len(placed.devices))])


def _run_channels(placed: Placed, call: Call, training: bool) -> tf.Tensor:
    layer, (value,) = call.operation, call.inputs
    held, partial = placed.sharded(value, _channel_axis(layer), layer.kernel.value.sizes), []
    for shard, (device, channels) in enumerate(zip(placed.devices, held.tensors, strict=True)):
        with tf.device(device):
            partial.append(_convolved(layer, channels, shard, device))
    output = sharded_values.added(partial, placed.devices)
    with tf.device(placed.devices[0]):
        bias = None if layer.bias is None else tf.cast(tf.convert_to_tensor(layer.bias), layer.compute_dtype)
        output = _with_bias(layer, output, bias)
        output = output if layer.activation is None else layer.activation(output)
        return keras_model.with_mask(output, layer_mask(layer, placed, value))


def _run_depthwise(placed: Placed, call: Call, training: bool) -> Any:
    layer, (value,) = call.operation, call.inputs
    return _outputs(placed, call, placed.sharded(value, _channel_axis(layer), layer.kernel.value.sizes).tensors)


def _outputs(placed: Placed, call: Call, inputs: Sequence[tf.Tensor]) -> Any:
    """Return the output channels that each shard computes from its input."""
    layer, outputs = call.operation, []
    for shard, (device, channels) in enumerate(zip(placed.devices, inputs, strict=True)):
        bias = None if layer.bias is None else weight_shard(layer.bias, shard, device, layer.compute_dtype)
        with tf.device(device):
            outputs.append(_with_bias(layer, _convolved(layer, channels, shard, device), bias))
    return activated(outputs, _channel_axis(layer), placed, call)


def _convolved(layer: Any, inputs: tf.Tensor, shard: int, device: str) -> tf.Tensor:
    kernel = weight_shard(layer.kernel, shard, device, layer.compute_dtype)
    convolve = keras.ops.depthwise_conv if isinstance(layer, DEPTHWISE) else keras.ops.conv
    return convolve(
        tf.cast(inputs, layer.compute_dtype),
        kernel,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def _with_bias(layer: Any, outputs: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    if bias is None:
        return outputs
    shape = [1] * (layer.rank + 2)
    shape[_channel_axis(layer)] = int(bias.shape[0])
    return keras.ops.add(outputs, keras.ops.reshape(bias, shape))


def _run_channelwise(gives: int, placed: Placed, call: Call, training: bool) -> ShardedValue:
    value = call.inputs[0]
    held, outputs = placed.tensors[value], []
    for device, channels in zip(placed.devices, held.tensors, strict=True):
        with tf.device(device):
            masked = keras_model.with_mask(channels, None if held.mask is None else tf.identity(held.mask))
            outputs.append(run_call(call, {value: masked}, training))
    return ShardedValue(tuple(outputs), gives, keras_model.mask_of(outputs[0]))


@contextlib.contextmanager
def _any_number_of_channels(layer: Any) -> Iterator[None]:
    spec, layer.input_spec = layer.input_spec, None
    try:
        yield
    finally:
        layer.input_spec = spec


def _run_normalization(axis: int, placed: Placed, call: Call, training: bool) -> ShardedValue:
    layer, value = call.operation, call.inputs[0]
    held = placed.sharded(value, axis, even_sizes(int(value.shape[axis] or 0), len(placed.devices)))
    sizes = [int(shard.shape[axis]) for shard in held.tensors]
    statistics = [(state, _state_shards(state, sizes, placed)) for state in (layer.moving_mean, layer.moving_variance)]
    outputs, changed = [], []
    for shard, (device, channels) in enumerate(zip(placed.devices, held.tensors, strict=True)):
        own = {id(state): values[shard] for state, values in statistics}
        with (
            tf.device(device),
            sharded_memory.as_shards(layer.variables, shard, own),
            _any_number_of_channels(layer),
        ):
            masked = keras_model.with_mask(channels, None if held.mask is None else tf.identity(held.mask))
            outputs.append(run_call(call, {value: masked}, training))
            changed.append([tf.convert_to_tensor(state) for state, _ in statistics])
    for (state, before), after in zip(statistics, zip(*changed, strict=True), strict=True):
        if after[0] is not before[0]:
            state.assign(sharded_values.gathered(after, 0, placed.devices))
    return ShardedValue(tuple(outputs), axis, keras_model.mask_of(outputs[0]))


def _state_shards(state: Any, sizes: Sequence[int], placed: Placed) -> tuple[tf.Tensor, ...]:
    with tf.device(placed.devices[0]):
        whole = tf.convert_to_tensor(state)
    return sharded_values.split(whole, sizes, 0, placed.devices)
