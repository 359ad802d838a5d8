"""The shards of a layer call: its inputs, and the pieces of its weights, on each device."""

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
    """The values of one run of a model, whole or in pieces, and their copies on other devices.

    Args:
        tensors: The values: a tensor on the first device, or its pieces.
        devices: The device of each shard.
    """

    def __init__(self, tensors: dict[Value, Any], devices: Sequence[str]) -> None:
        self.tensors, self.devices = tensors, devices
        self._whole: dict[Value, Any] = {}
        self._copies: dict[tuple[Value, int], tf.Tensor] = {}

    def whole(self, value: Value) -> Any:
        """Return a whole value on the first device; pieces are gathered once."""
        held = self.tensors[value]
        if not isinstance(held, ShardedValue):
            return held
        if value not in self._whole:
            tensor = sharded_values.gathered(held.tensors, held.axis, self.devices)
            self._whole[value] = keras_model.with_mask(tensor, held.mask)
        return self._whole[value]

    def on(self, value: Value, shard: int) -> tf.Tensor:
        """Return a whole value on the device of a shard, where it is sent once."""
        if (value, shard) not in self._copies:
            tensor = self.whole(value)
            self._copies[value, shard] = sharded_values.sent(tensor, self.devices[0], self.devices[shard])
        return self._copies[value, shard]

    def pieces(self, value: Value, axis: int, sizes: Sequence[int]) -> ShardedValue:
        """Return the pieces of a value; a whole one is divided, as a user's rule may ask for.

        Args:
            value: A value.
            axis: The divided axis, from the end.
            sizes: The size of each piece of a whole value.
        """
        held = self.tensors[value]
        if isinstance(held, ShardedValue):
            return held
        return ShardedValue(sharded_values.divided(held, sizes, axis, self.devices), axis, self.mask(value))

    def mask(self, value: Value) -> Any:
        """Return the Keras mask of a value, None for none."""
        held = self.tensors[value]
        return held.mask if isinstance(held, ShardedValue) else keras_model.mask_of(held)

    def remove_mask(self, value: Value) -> None:
        """Remove the Keras mask of a value, as a layer does that removes those of its inputs."""
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
    """The values of a run as whole tensors on the first device, for layer calls that are not divided."""

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


def weight_piece(variable: Any, shard: int, device: str, dtype: str | None = None) -> tf.Tensor:
    """Return the piece of a weight for a shard on a device, perhaps in another type.

    Args:
        variable: A divided Keras variable.
        shard: The number of the shard.
        device: The device of the shard, that of the piece or that of another replica.
        dtype: The type; None for that of the variable.
    """
    memory = sharded_memory.memories_of(variable)[shard]
    with tf.device(memory.device):
        value = sharded_memory.read(memory)
    arrived = sent(value, keras_variables.full_name(memory.device), keras_variables.full_name(device))
    with tf.device(device):
        return arrived if dtype is None else tf.cast(arrived, dtype)


def layer_mask(layer: Any, placed: Placed, value: Value) -> Any:
    """Return the Keras mask of the output of a layer for one input, on the first device; None for none."""
    with tf.device(placed.devices[0]):
        if not layer.supports_masking:
            return None
        held = placed.tensors[value]
        return layer.compute_mask(None if isinstance(held, ShardedValue) else held, placed.mask(value))
