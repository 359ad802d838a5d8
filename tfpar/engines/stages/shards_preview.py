"""The preview of tensor parallelism without stages: the memory of each device, and the layers that stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.engines.preview import Preview, ReplicaRow, replicas_table
from tfpar.pipeline.graph.ir import Call
from tfpar.placement.owners import num_bytes
from tfpar.sharding.model_sharding import ModelSharding
from tfpar.sharding.whole_layers import lines_of, whole_share


def shards_preview(
    title: str, model: keras.Model, calls: Sequence[Call], sharding: ModelSharding, num_examples: int,
    replicas: Sequence[Sequence[str]],
) -> Preview:  # fmt: skip
    """Return the preview of a step in a single stage of shards.

    Args:
        title: The first line.
        model: A model with sharded weights.
        calls: Its layer calls.
        sharding: Their sharding.
        num_examples: The size of a global batch.
        replicas: The devices of each replica, in the order of the shards.
    """
    num_examples = -(-num_examples // len(replicas))
    rows = tuple(
        _shard_row(model, device, same_shard, num_examples)
        for devices in replicas
        for device, same_shard in zip(devices, zip(*replicas, strict=True), strict=True)
    )
    lines = lines_of(calls, sharding) or ["no layer is sharded"]
    share = whole_share(model, calls, sharding.weights, sharding.whole)[1]
    return Preview("\n".join([replicas_table(title, rows, len(replicas)), "", *lines, share]), rows)


def _shard_row(model: keras.Model, device: str, same_shard: Sequence[str], num_examples: int) -> ReplicaRow:
    """Return the row of a device. It counts the weights of its shard on all replicas, which a step copies here."""
    optimizer, weights = keras_variables.optimizer_of(model), _on(model.variables, same_shard)
    slots = _on(optimizer.variables if optimizer else (), [device])
    gradient_bytes = sum(map(num_bytes, _on(model.trainable_variables, same_shard)))
    return ReplicaRow(
        device=device.removeprefix("/device:"),
        num_examples=num_examples,
        num_parameters=sum(int(weight.shape.num_elements() or 0) for weight in weights),
        state_bytes=sum(map(num_bytes, [*weights, *slots])) + gradient_bytes,
        gradient_bytes=gradient_bytes,
    )


def _on(variables: Sequence[Any], devices: Sequence[str]) -> list[Any]:
    """Return the variables and shards on some devices."""
    shards = [shard for variable in variables for shard in sharded_memory.shards_of(variable)]
    return [shard for shard in shards if any(keras_variables.is_on(shard, device) for device in devices)]
