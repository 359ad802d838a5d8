"""Bytes that workers exchange in a step of a grid of replicas and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfpar import cluster
from tfpar.messages.number_format import three_digits
from tfpar.pipeline.graph.ir import Graph, Value
from tfpar.pipeline.partition.stages import Stage, bytes_per_example, variable_owners, variable_readers
from tfpar.placement.owners import num_bytes, placements


class Traffic(NamedTuple):
    """Bytes that workers exchange in a step.

    Args:
        activation_bytes: Model inputs, activations and their gradients.
        gradient_bytes: Weight gradients sent to the device of the weight, and updated weights sent back.
    """

    activation_bytes: int
    gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of both."""
        return self.activation_bytes + self.gradient_bytes


class Grid(NamedTuple):
    """An assignment of stages to devices.

    Args:
        devices: The device of each stage, for each replica.
        traffic: The bytes between workers in a step.
    """

    devices: list[list[str]]
    traffic: Traffic


def sort_by_traffic(
    model: keras.Model,
    graph: Graph,
    stages: Sequence[Stage],
    grids: Sequence[list[list[str]]],
    num_examples: int,
) -> list[Grid]:
    """Sort assignments of stages to devices by their bytes between workers, the fewest first.

    Args:
        model: The model.
        graph: Its layer calls.
        stages: Its stages.
        grids: For each assignment, the device of each stage for each replica.
        num_examples: Number of examples in a global batch.
    """
    measured = [Grid(devices, traffic(model, graph, stages, devices, num_examples)) for devices in grids]
    return sorted(measured, key=lambda grid: grid.traffic.total_bytes)


def describe_traffic(grids: Sequence[Grid]) -> str | None:
    """Describe the bytes between workers of the best grid; None if there are none.

    Args:
        grids: The result of `sort_by_traffic`.

    Example:
        >>> best, second = Traffic(2_000_000, 500_000), Traffic(0, 12_000_000)
        >>> print(describe_traffic([Grid([], best), Grid([], second)]).partition(";")[0])
        2.50 MB a step between workers (activations 2.00, gradients and weights 0.500
    """
    best, *others = (grid.traffic for grid in grids)
    if not any(other.total_bytes for other in (best, *others)):
        return None
    comparison = f"; {_megabytes(others[0].total_bytes)} MB with the devices in another order" if others else ""
    return (
        f"{_megabytes(best.total_bytes)} MB a step between workers (activations "
        f"{_megabytes(best.activation_bytes)}, gradients and weights {_megabytes(best.gradient_bytes)}{comparison})"
    )


def _megabytes(number: int) -> str:
    return three_digits(number / 1e6)


def traffic(
    model: keras.Model, graph: Graph, stages: Sequence[Stage], devices: Sequence[Sequence[str]], num_examples: int
) -> Traffic:
    """Return the bytes between workers in a step. The first worker reads the data.

    Args:
        model: The model.
        graph: Its layer calls.
        stages: Its stages.
        devices: The device of each stage, for each replica.
        num_examples: Number of examples in a global batch.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> from tfpar.pipeline.partition.stages import split_graph
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        >>> graph, machines = trace(model), ["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
        >>> traffic(model, graph, split_graph(graph, [1, 1]), [machines], num_examples=10)  # 10 x 8 float32, and back
        Traffic(activation_bytes=640, gradient_bytes=0)
    """
    workers = [list(map(_worker, names)) for names in devices]
    if {worker for ranks in workers for worker in ranks} == {"0"}:
        return Traffic(0, 0)
    per_example = sum(
        _activation_bytes(graph, stages, ranks, names) for ranks, names in zip(workers, devices, strict=True)
    )
    return Traffic(per_example * num_examples // len(devices), _gradient_bytes(model, stages, workers))


def _worker(device: str) -> str:
    rank, is_of_worker, _ = cluster.short_name(device).partition("/")
    return rank if is_of_worker else "0"


def _activation_bytes(graph: Graph, stages: Sequence[Stage], workers: Sequence[str], devices: Sequence[str]) -> int:
    """Return the bytes of one example between the workers of a replica. Each device receives a value once."""
    producers = {value: workers[stage.index] for stage in reversed(stages) for value in stage.outputs}
    sent: dict[tuple[Value, str], int] = {}
    for stage in stages:
        for value in stage.inputs:
            is_input = value in graph.inputs
            source = "0" if is_input else producers[value]
            num_directions = 1 if is_input or not tf.as_dtype(value.dtype).is_floating else 2
            if source != workers[stage.index]:
                sent[value, devices[stage.index]] = num_directions * bytes_per_example(value)
    return sum(sent.values())


def _gradient_bytes(model: keras.Model, stages: Sequence[Stage], workers: Sequence[Sequence[str]]) -> int:
    """Return the bytes of gradients and of copied weights between workers."""
    owners, readers = (
        placements(model, variable_owners(stages, model.variables), len(workers)),
        variable_readers(stages),
    )
    trained = set(map(id, model.trainable_variables))
    total = 0
    for variable in model.variables:
        replica, stage = owners[id(variable)]
        reading = [ranks[reader] for ranks in workers for reader in readers.get(id(variable), ())]
        num_remote = sum(worker != workers[replica][stage] for worker in reading)
        total += num_remote * num_bytes(variable) * (2 if id(variable) in trained else 1)
    return total
