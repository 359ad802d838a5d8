"""From a model to its stages: what each layer costs, and where the cuts fall."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition import balance as balances
from tfpar.pipeline.partition.layer_profile import CallCost
from tfpar.pipeline.partition.stages import Stage, bytes_per_example, crossing, split_graph

Measure = Literal["time", "flops", "parameters", "memory"]
MEASURES = ("time", "flops", "parameters", "memory")
Balance = Measure | Sequence[int] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Partition:
    """A model divided into stages.

    Args:
        graph: Its operations.
        stages: Consecutive operations each.
        costs: What each operation costs, in the order of the graph.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    costs: tuple[CallCost, ...]

    @property
    def costs_of_stages(self) -> list[tuple[CallCost, ...]]:
        """The costs of each stage's operations."""
        ends = list(itertools.accumulate(len(stage.calls) for stage in self.stages))
        return [self.costs[end - len(stage.calls) : end] for end, stage in zip(ends, self.stages, strict=True)]

    @property
    def crossing(self) -> list[tuple[Value, ...]]:
        """The values that cross the cut behind each stage but the last."""
        ends = itertools.accumulate(len(stage.calls) for stage in self.stages[:-1])
        across = crossing(self.graph)
        return [across[end - 1] for end in ends]


def check_balance(balance: Any, num_stages: int) -> None:
    """Refuse what is no way to balance.

    Raises:
        ValueError: If it is neither a measure, nor as many numbers as stages, nor one name less.
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
            f"balance as numbers must give the layers of each stage, {num_stages} numbers above 0, received {values}."
        )


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """What training needs of memory, estimated before anything runs.

    Args:
        limit_bytes: What a device may hold; None for no limit.
        slots_per_weight: Variables that the optimizer keeps for a weight, in its size.
        num_activations: Micro-batches whose activations a stage keeps at once, at most.
    """

    limit_bytes: int | None
    slots_per_weight: int
    num_activations: int

    def of_call(self, cost: CallCost) -> int:
        """Return the bytes of an operation: weights, their gradients and optimizer state, and activations."""
        return self.fixed([cost]) + self.num_activations * cost.activation_bytes

    def fixed(self, costs: Sequence[CallCost]) -> int:
        """Return the bytes of operations' weights, their gradients and optimizer state."""
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
    """Divide a model's operations into stages.

    Args:
        graph: The operations.
        balance: A measure, numbers of calls, or names of calls to cut before.
        num_stages: How many stages.
        num_devices: Over how many devices; stage s sits on device `s % num_devices`.
        costs: What each operation costs.
        microbatch_size: Examples of a micro-batch.
        memory: What training needs of memory, and how much there is.

    Raises:
        ValueError: If there are more stages than operations, a name does not exist, or the memory does not suffice.
    """
    names = [call.name for call in graph.calls]
    needs = [memory.of_call(cost) for cost in costs]
    if isinstance(balance, str):
        by_measure: dict[str, Sequence[float]] = {
            "time": [cost.forward_seconds + cost.backward_seconds for cost in costs],
            "flops": [cost.flops for cost in costs],
            "parameters": [cost.parameters for cost in costs],
            "memory": needs,
        }
        sizes = balances.balance_layers(
            by_measure[balance],
            num_stages,
            traffic_bytes=[microbatch_size * sum(map(bytes_per_example, values)) for values in crossing(graph)],
            memory_bytes=needs,
            memory_limit_bytes=memory.limit_bytes,
            num_devices=num_devices,
            names=names,
        )
    elif isinstance(balance[0], str):
        sizes = balances.from_names([str(name) for name in balance], names, num_stages)
    else:
        sizes = balances.from_sizes([size for size in balance if isinstance(size, int)], len(names), num_stages)
    _check_memory(sizes, needs, num_devices, memory.limit_bytes)
    return Partition(graph, split_graph(graph, sizes), tuple(costs))


def _check_memory(sizes: Sequence[int], needs: Sequence[int], num_devices: int, limit_bytes: int | None) -> None:
    """Refuse a user's own cuts where they exceed the limit."""
    ends = list(itertools.accumulate(sizes))
    of_stage = [sum(needs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    of_device = [sum(of_stage[device::num_devices]) for device in range(num_devices)]
    if limit_bytes is not None and max(of_device) > limit_bytes:
        raise ValueError(
            f"No device may hold more than memory_limit_bytes = {limit_bytes:,}, and with these cuts the devices need "
            f"{', '.join(f'{need:,}' for need in of_device)} bytes. Cut elsewhere, leave the cuts to balance='memory', "
            "use more stages, smaller micro-batches or recompute=True."
        )
