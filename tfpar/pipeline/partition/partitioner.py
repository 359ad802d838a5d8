"""Partition of a model into stages, by the costs of its layer calls or as the user lists them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition import balance as balances
from tfpar.pipeline.partition.layer_profile import CallCost
from tfpar.pipeline.partition.stages import Stage, bytes_per_example, cut_values, split_graph

Measure = Literal["time", "flops", "parameters", "memory"]
MEASURES = ("time", "flops", "parameters", "memory")
Balance = Measure | Sequence[int] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Partition:
    """A model as a sequence of stages.

    Args:
        graph: The layer calls of the model.
        stages: The stages, in order.
        costs: The cost of each layer call, in the order of the graph.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    costs: tuple[CallCost, ...]

    @property
    def stage_costs(self) -> list[tuple[CallCost, ...]]:
        """The costs of the layer calls of each stage."""
        ends = list(itertools.accumulate(len(stage.calls) for stage in self.stages))
        return [self.costs[end - len(stage.calls) : end] for end, stage in zip(ends, self.stages, strict=True)]

    @property
    def cut_values(self) -> list[tuple[Value, ...]]:
        """The values that cross the cut after each stage except the last."""
        ends = itertools.accumulate(len(stage.calls) for stage in self.stages[:-1])
        possible_cuts = cut_values(self.graph)
        return [possible_cuts[end - 1] for end in ends]

    def with_sizes(self, sizes: Sequence[int]) -> Partition:
        """Return the same layer calls in stages with other numbers of calls."""
        return Partition(self.graph, split_graph(self.graph, sizes), self.costs)

    def device_bytes(self, memory: MemoryNeeds, num_devices: int) -> list[int]:
        """Estimate the memory of each device; stage s runs on device `s % num_devices`."""
        stage_bytes = [sum(map(memory.call_bytes, costs)) for costs in self.stage_costs]
        return [sum(stage_bytes[device::num_devices]) for device in range(num_devices)]


def check_balance(balance: Any, num_stages: int) -> None:
    """Raise an error if a balance is invalid for every model.

    Args:
        balance: The argument of `tfpar.Pipeline`.
        num_stages: Number of stages.

    Raises:
        ValueError: If it is neither a measure, nor a number for each stage, nor a name for each stage except stage 0.

    Example:
        >>> check_balance([3, 2], num_stages=2)
    """
    if isinstance(balance, str):
        if balance not in MEASURES:
            raise ValueError(f"balance must be one of {', '.join(MEASURES)}, received {balance!r}.")
        return
    values = list(balance) if isinstance(balance, Sequence) else [balance]
    if values and all(isinstance(value, str) for value in values):
        if len(values) != num_stages - 1:
            raise ValueError(
                f"balance as layer names must name the layers to cut before, {num_stages - 1} for {num_stages} stages, "
                f"received {len(values)}: {values}."
            )
    elif len(values) != num_stages or not all(isinstance(value, int) and value > 0 for value in values):
        raise ValueError(
            f"balance as numbers must be the number of layers of each stage, {num_stages} numbers above 0, received "
            f"{values}."
        )


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """Estimates the memory of training from the costs of layer calls.

    Args:
        limit_bytes: Memory of a device; None for no limit.
        slots_per_weight: Number of optimizer variables for each weight.
        num_activations: Maximum number of micro-batches in flight on a stage.

    Example:
        >>> cost = CallCost(0.0, 0.0, 0.0, parameters=40, weight_bytes=160, trainable_bytes=160, activation_bytes=64)
        >>> MemoryNeeds(limit_bytes=None, slots_per_weight=2, num_activations=4).call_bytes(cost)
        896
    """

    limit_bytes: int | None
    slots_per_weight: int
    num_activations: int

    def call_bytes(self, cost: CallCost) -> int:
        """Return the bytes of a layer call: weights, gradients, optimizer state and activations."""
        return self.fixed_bytes([cost]) + self.num_activations * cost.activation_bytes

    def fixed_bytes(self, costs: Sequence[CallCost]) -> int:
        """Return the bytes of weights, gradients and optimizer state of several layer calls."""
        return sum(cost.weight_bytes + (1 + self.slots_per_weight) * cost.trainable_bytes for cost in costs)


def partition_model(
    graph: Graph,
    balance: Balance,
    num_stages: int,
    num_devices: int,
    costs: Sequence[CallCost],
    microbatch_size: int,
    memory: MemoryNeeds,
) -> Partition:
    """Partition a model into stages.

    Args:
        graph: The model.
        balance: A measure, the number of layer calls of each stage, or the names of the layer calls to cut before.
        num_stages: Number of stages.
        num_devices: Number of devices. Stage s runs on device `s % num_devices`.
        costs: The cost of each layer call.
        microbatch_size: Number of examples in a micro-batch.
        memory: The estimate of the memory, with its limit.

    Raises:
        ValueError: If there are more stages than layer calls, a name does not exist, or the limit is too small.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> graph = trace(keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))]))
        >>> no_limit = MemoryNeeds(limit_bytes=None, slots_per_weight=2, num_activations=2)
        >>> partition = partition_model(graph, [2, 1], 2, 2, costs=(), microbatch_size=8, memory=no_limit)
        >>> [len(stage.calls) for stage in partition.stages]
        [2, 1]
    """
    names = [call.name for call in graph.calls]
    memory_bytes = [memory.call_bytes(cost) for cost in costs]
    if isinstance(balance, str):
        by_measure: dict[str, Sequence[float]] = {
            "time": [cost.forward_seconds + cost.backward_seconds for cost in costs],
            "flops": [cost.flops for cost in costs],
            "parameters": [cost.parameters for cost in costs],
            "memory": memory_bytes,
        }
        sizes = balances.balance_layers(
            by_measure[balance],
            num_stages,
            transfer_bytes=[microbatch_size * sum(map(bytes_per_example, values)) for values in cut_values(graph)],
            memory_bytes=memory_bytes,
            memory_limit_bytes=memory.limit_bytes,
            num_devices=num_devices,
            names=names,
        )
    elif isinstance(balance[0], str):
        sizes = balances.from_names([str(name) for name in balance], names, num_stages)
    else:
        sizes = balances.from_sizes([size for size in balance if isinstance(size, int)], len(names), num_stages)
    _check_memory(sizes, memory_bytes, num_devices, memory.limit_bytes)
    return Partition(graph, split_graph(graph, sizes), tuple(costs))


def _check_memory(sizes: Sequence[int], call_bytes: Sequence[int], num_devices: int, limit_bytes: int | None) -> None:
    """Raise an error if a balance given as sizes or names exceeds the limit."""
    ends = list(itertools.accumulate(sizes))
    stage_bytes = [sum(call_bytes[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    device_bytes = [sum(stage_bytes[device::num_devices]) for device in range(num_devices)]
    if limit_bytes is not None and max(device_bytes) > limit_bytes:
        raise ValueError(
            f"Each device has memory_limit_bytes={limit_bytes:,}, and with this balance the devices need "
            f"{', '.join(f'{number:,}' for number in device_bytes)} bytes; cut elsewhere, choose balance='memory', use "
            "more stages, smaller micro-batches or recompute=True."
        )
