"""The bytes that the machines of a grid of replicas and stages exchange in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfpar import cluster
from tfpar.messages.number_format import three_digits
from tfpar.pipeline.graph.ir import Graph, Value
from tfpar.pipeline.partition.stages import Stage, bytes_per_example, owner_of, users_of
from tfpar.placement.owners import num_bytes, placements


class Traffic(NamedTuple):
    """Bytes from one machine to another in a step.

    Args:
        activation_bytes: Inputs of the model, activations and their gradients.
        gradient_bytes: Gradients of weights on their way to the device of the weight, and copies of the new weights.
    """

    activation_bytes: int
    gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.activation_bytes + self.gradient_bytes


class Grid(NamedTuple):
    """The devices of the stages of a model.

    Args:
        devices: The device of each stage, for each replica.
        traffic: The bytes between machines in a step.
    """

    devices: list[list[str]]
    traffic: Traffic


def by_traffic(
    model: keras.Model,
    graph: Graph,
    stages: Sequence[Stage],
    grids: Sequence[list[list[str]]],
    num_examples: int,
) -> list[Grid]:
    """Return grids, that of the fewest bytes between machines first.

    Args:
        model: The model.
        graph: Its layer calls.
        stages: Its stages.
        grids: For each grid the device of each stage, for each replica.
        num_examples: Number of examples of a global batch.
    """
    found = [Grid(grid, traffic(model, graph, stages, grid, num_examples)) for grid in grids]
    return sorted(found, key=lambda one: one.traffic.total_bytes)


def describe_traffic(grids: Sequence[Grid]) -> str | None:
    """Say how much the machines of a grid exchange in a step; None for nothing.

    Args:
        grids: The grid, and others that it was preferred to.

    Example:
        >>> one, other = Traffic(2_000_000, 500_000), Traffic(0, 12_000_000)
        >>> print(describe_traffic([Grid([], one), Grid([], other)]).partition(";")[0])
        2.50 MB a step between workers (activations 2.00, gradients and weights 0.500
    """
    chosen, *others = (grid.traffic for grid in grids)
    if not any(one.total_bytes for one in (chosen, *others)):
        return None
    other = f"; {_megabytes(others[0].total_bytes)} MB with the devices in another order" if others else ""
    return (
        f"{_megabytes(chosen.total_bytes)} MB a step between workers (activations "
        f"{_megabytes(chosen.activation_bytes)}, gradients and weights {_megabytes(chosen.gradient_bytes)}{other})"
    )


def _megabytes(number: int) -> str:
    return three_digits(number / 1e6)


def traffic(
    model: keras.Model, graph: Graph, stages: Sequence[Stage], devices: Sequence[Sequence[str]], num_examples: int
) -> Traffic:
    """Return the bytes between machines in a step of a grid. The first machine reads the data.

    Args:
        model: The model.
        graph: Its layer calls.
        stages: Its stages.
        devices: The device of each stage, for each replica.
        num_examples: Number of examples of a global batch.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> from tfpar.pipeline.partition.stages import split_graph
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        >>> graph, machines = trace(model), ["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
        >>> traffic(model, graph, split_graph(graph, [1, 1]), [machines], num_examples=10)  # 10 x 8 float32, and back
        Traffic(activation_bytes=640, gradient_bytes=0)
    """
    machines = [[_machine(device) for device in of_one] for of_one in devices]
    if {machine for of_one in machines for machine in of_one} == {"0"}:
        return Traffic(0, 0)
    per_example = sum(
        _activation_bytes(graph, stages, of_one, names) for of_one, names in zip(machines, devices, strict=True)
    )
    return Traffic(per_example * num_examples // len(devices), _gradient_bytes(model, stages, machines))


def _machine(device: str) -> str:
    rank, is_of_worker, _ = cluster.short_name(device).partition("/")
    return rank if is_of_worker else "0"


def _activation_bytes(graph: Graph, stages: Sequence[Stage], machines: Sequence[str], devices: Sequence[str]) -> int:
    """Return the bytes of one example between the machines of a replica; a device receives a value once."""
    producers = {value: machines[stage.index] for stage in reversed(stages) for value in stage.outputs}
    sent: dict[tuple[Value, str], int] = {}
    for stage in stages:
        for value in stage.inputs:
            is_input = value in graph.inputs
            source = "0" if is_input else producers[value]
            ways = 1 if is_input or not tf.as_dtype(value.dtype).is_floating else 2
            if source != machines[stage.index]:
                sent[value, devices[stage.index]] = ways * bytes_per_example(value)
    return sum(sent.values())


def _gradient_bytes(model: keras.Model, stages: Sequence[Stage], machines: Sequence[Sequence[str]]) -> int:
    """Return the bytes of gradients and of copied weights between machines."""
    home_of, users = placements(model, owner_of(stages, model.variables), len(machines)), users_of(stages)
    trained = set(map(id, model.trainable_variables))
    total = 0
    for variable in model.variables:
        replica, stage = home_of[id(variable)]
        readers = [of_one[user] for of_one in machines for user in users.get(id(variable), ())]
        num_away = sum(reader != machines[replica][stage] for reader in readers)
        total += num_away * num_bytes(variable) * (2 if id(variable) in trained else 1)
    return total
