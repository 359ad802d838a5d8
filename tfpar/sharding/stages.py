"""Tensor parallelism inside pipeline stages: each stage runs on several devices.

    replica 0   stage 0: devices 0 1 ─► stage 1: devices 2 3
    replica 1   stage 0: devices 4 5 ─► stage 1: devices 6 7

Stages are sharded independently: each receives and sends whole values on its first device. Only class scores are sent
to the loss in shards. A weight that several stages read stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.variables import keras_variables
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.ir import Call, Graph, Value, run_call
from tfpar.pipeline.partition.stages import Stage, variable_owners, variable_readers
from tfpar.placement.owners import placements
from tfpar.placement.weight_devices import place_weights
from tfpar.sharding.model_sharding import ModelSharding, ShardingRule
from tfpar.sharding.offers import sharding_of
from tfpar.sharding.placed_values import Placed, WholeValues
from tfpar.sharding.rules import Rules
from tfpar.sharding.whole_layers import warn_of_nothing, warn_of_whole

Groups = Mapping[str, Sequence[str]]
# Regularizers that are sums over elements, and therefore over shards.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ShardedStage(NamedTuple):
    """The layer calls of a stage with their sharding rules.

    Args:
        calls: Its layer calls.
        outputs: The values that it sends.
        rules: The rule of each layer call, or None for a call that only runs on the first device.
        devices: The device of each shard.
    """

    calls: Sequence[Call]
    outputs: Sequence[Value]
    rules: Sequence[ShardingRule | None]
    devices: Sequence[str]

    def run(self, tensors: dict[Value, Any], training: bool) -> None:
        """Add the outputs of the layer calls to `tensors`. Those that the stage sends are gathered on the first device.

        Args:
            tensors: The inputs of the stage.
            training: Whether the model trains.
        """
        placed = Placed(tensors, self.devices)
        _run_calls(self.calls, self.rules, placed, training)
        for value in self.outputs:
            tensors[value] = placed.whole(value)


def _run_calls(calls: Sequence[Call], rules: Sequence[ShardingRule | None], placed: Placed, training: bool) -> None:
    """Run layer calls by their sharding rules, and add their outputs to the values of the run."""
    rule_of = {id(call): rule for call, rule in zip(calls, rules, strict=True)}

    def run(call: Call, tensors: dict[Value, Any], training: bool) -> Any:
        rule = rule_of[id(call)]
        if rule is not None and rule.run is not None:
            return rule.run(placed, call, training)
        with tf.device(placed.devices[0]):
            results = run_call(call, WholeValues(placed), training)
        for value in call.inputs:
            if placed.mask(value) is not None and keras_model.mask_of(placed.whole(value)) is None:
                placed.remove_mask(value)
        return results

    model_graph.run(calls, placed.tensors, training, run)


def groups_of(devices: Sequence[str], num_shards: int) -> dict[str, list[str]]:
    """Group consecutive devices. Returns the groups by their first device, or nothing for a single shard.

    Args:
        devices: Names of devices.
        num_shards: The size of a group.

    Example:
        >>> groups_of(["CPU:0", "CPU:1", "CPU:2", "CPU:3"], 2)["/device:CPU:2"]
        ['/device:CPU:2', '/device:CPU:3']
    """
    if num_shards == 1:
        return {}
    names = [f"/device:{name}" for name in devices]
    return {names[first]: names[first : first + num_shards] for first in range(0, len(names), num_shards)}


def shard_stages(
    model: keras.Model,
    graph: Graph,
    stages: Sequence[Stage],
    devices: Sequence[Sequence[str]],
    groups: Groups,
    user_rules: Rules | None = None,
    *,
    warns: bool = False,
) -> dict[int, tuple[ModelSharding, ShardedStage]]:
    """Choose how each stage is sharded, and place the weights of a model on the devices of their stages.

    Args:
        model: A model with built layers.
        graph: Its layer calls.
        stages: Its stages.
        devices: The first device of each stage, for each replica.
        groups: The devices of each group, by the first of them.
        user_rules: The user's rules for all weights, or None for an automatic choice.
        warns: Whether to warn if no layer is sharded, or if a large one is not.

    Returns:
        The sharding and the layer calls of each stage in the first replica, by the index of the stage.

    Raises:
        ValueError: If a rule does not fit the model, or its stages.
    """
    whole = _whole(model, graph, stages)
    sharded = {}
    for stage, first in zip(stages, devices[0], strict=True):
        sharding = sharding_of(model, graph, len(groups[first]), user_rules, stage.calls, whole)
        sharded[stage.index] = sharding, ShardedStage(stage.calls, stage.outputs, sharding.rules, groups[first])
    home_of = placements(model, variable_owners(stages, model.variables), len(devices))

    def devices_of(variable: Any) -> list[str]:
        replica, stage = home_of[id(variable)]
        return list(map(keras_variables.full_name, groups[devices[replica][stage]]))

    shardings = {key: cut for sharding, _ in sharded.values() for key, cut in sharding.weights.items()}
    reasons = {name: why for sharding, _ in sharded.values() for name, why in sharding.whole.items()}
    if warns and not shardings:
        warn_of_nothing(model, reasons)
    elif warns and user_rules is None:
        warn_of_whole(model, graph.calls, shardings, reasons)
    place_weights(model, devices_of, shardings)
    return sharded


def _whole(model: keras.Model, graph: Graph, stages: Sequence[Stage]) -> dict[int, str]:
    """Return why some variables must stay whole, by the variable's `id`."""
    reasons = {
        id(variable): "its regularizer is not a sum over its elements"
        for variable in model.variables
        if variable.regularizer is not None and type(variable.regularizer) not in _SUMS
    }
    return reasons | {
        key: "several stages read it" for key, users in variable_readers(stages).items() if len(users) > 1
    }
