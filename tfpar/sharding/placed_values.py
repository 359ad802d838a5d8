"""The inputs and weights of layer calls on each device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.pipeline.graph.ir import Value
from tfpar.sharding import sharded_values
from tfpar.sharding.sharded_values import ShardedValue, sent


class Placed:
    """The values of one run of a model, whole or sharded, and their copies on other devices.

    Args:
        tensors: The values: a tensor on the first device, or a `ShardedValue`.
        devices: The device of each shard.
    """

    def __init__(self, tensors: dict[Value, Any], devices: Sequence[str]) -> None:
        self.tensors, self.devices = tensors, devices
        self._whole: dict[Value, Any] = {}
        self._copies: dict[tuple[Value, int], tf.Tensor] = {}

    def whole(self, value: Value) -> Any:
        """Return a whole value on the first device. A sharded one is gathered once."""
        held = self.tensors[value]
        if not isinstance(held, ShardedValue):
            return held
        if value not in self._whole:
            tensor = sharded_values.gathered(held.tensors, held.axis, self.devices)
            self._whole[value] = keras_model.with_mask(tensor, held.mask)
        return self._whole[value]

    def on(self, value: Value, shard: int) -> tf.Tensor:
        """Return a whole value on the device of a shard. It is sent there once."""
        if (value, shard) not in self._copies:
            tensor = self.whole(value)
            self._copies[value, shard] = sharded_values.sent(tensor, self.devices[0], self.devices[shard])
        return self._copies[value, shard]

    def sharded(self, value: Value, axis: int, sizes: Sequence[int]) -> ShardedValue:
        """Return a sharded value. A whole one is split, which only the user's rules can require.

        Args:
            value: A value.
            axis: The sharded axis, counted from the end.
            sizes: The sizes of the shards of a whole value.
        """
        held = self.tensors[value]
        if isinstance(held, ShardedValue):
            return held
        return ShardedValue(sharded_values.split(held, sizes, axis, self.devices), axis, self.mask(value))

    def mask(self, value: Value) -> Any:
        """Return the Keras mask of a value, or None."""
        held = self.tensors[value]
        return held.mask if isinstance(held, ShardedValue) else keras_model.mask_of(held)

    def remove_mask(self, value: Value) -> None:
        """Remove the Keras mask of a value, for layers that remove the masks of their inputs."""
        held = self.tensors[value]
        if isinstance(held, ShardedValue):
            self.tensors[value] = dataclasses.replace(held, mask=None)
            self._whole.pop(value, None)
        elif keras_model.mask_of(held) is not None:
            with tf.device(self.devices[0]):
                self.tensors[value] = keras_model.with_mask(held, None)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.tensors)


class WholeValues(Mapping[Value, Any]):
    """The values of a run as whole tensors on the first device, for calls that are not sharded."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed

    def __getitem__(self, value: Value) -> Any:
        """Return a whole value."""
        return self._placed.whole(value)

    def __iter__(self) -> Iterator[Value]:
        """Iterate over all values."""
        return iter(self._placed)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._placed.tensors)


def weight_shard(variable: Any, shard: int, device: str, dtype: str | None = None) -> tf.Tensor:
    """Return a shard of a weight on a device.

    Args:
        variable: A sharded Keras variable.
        shard: The index of the shard.
        device: The device that reads the shard: its own, or that of another replica.
        dtype: The dtype of the result. Defaults to that of the variable.
    """
    memory = sharded_memory.memories_of(variable)[shard]
    with tf.device(memory.device):
        value = sharded_memory.read(memory)
    arrived = sent(value, keras_variables.full_name(memory.device), keras_variables.full_name(device))
    with tf.device(device):
        return arrived if dtype is None else tf.cast(arrived, dtype)


def layer_mask(layer: Any, placed: Placed, value: Value) -> Any:
    """Return the Keras mask of the output of a layer with a single input, on the first device, or None."""
    with tf.device(placed.devices[0]):
        if not layer.supports_masking:
            return None
        held = placed.tensors[value]
        return layer.compute_mask(None if isinstance(held, ShardedValue) else held, placed.mask(value))
