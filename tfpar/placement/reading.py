"""What a placement costs: operations on the host between those of a GPU, waits, detours, entries of the batch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpar.placement.device_choice import HOST, choose_devices
from tfpar.placement.lowered_graph import VARIANT, Output, lower
from tfpar.placement.transfers import Copy, PlacedGraph, Transfer

_OF_DATA = ("OptionalGetValue", "IteratorGetNext")
# What they return is a part of their input, or all of it.
_MOVING = (
    "ConcatV2",
    "Identity",
    "IdentityN",
    "Merge",
    "OptionalFromValue",
    "Reshape",
    "Slice",
    "Split",
    "SplitV",
    "StridedSlice",
    "Switch",
)
# Operations that create a bundle of tensors in the step, or read one that an earlier step has copied to a device, and
# those that return the bundles of their inputs.
_BUNDLES = ("EmptyTensorList", "OptionalFromValue", "ReadVariableOp")
_CARRYING = (
    "Identity",
    "Merge",
    "OptionalGetValue",
    "Switch",
    "TensorListConcatLists",
    "TensorListPopBack",
    "TensorListPushBack",
)


class Placed(NamedTuple):
    """An operation with its device.

    Attributes:
        kind: Such as "MatMul".
        name: Its name in the graph, after those of the calls around it.
        device: A short name, "CPU:0" for the host.
    """

    kind: str
    name: str
    device: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """The placement of a step.

    Attributes:
        operations: All operations, with their devices.
        on_host: Operations without a kernel for GPUs between two that have one.
        waits: Sizes, bounds and predicates that a GPU computes and the host waits for; each once.
        detours: Tensors that pass a GPU which no one asked for, on their way to another one.
        entries: How many parts of each tensor of a batch are copied to each GPU, by its number and the device; one is
            the tensor itself.
        entering: The copies of those parts, each once.
        moves: All copies between two GPUs.
    """

    operations: tuple[Placed, ...]
    on_host: tuple[Placed, ...]
    waits: tuple[Transfer, ...]
    detours: tuple[Transfer, ...]
    entries: Mapping[tuple[int, str], int]
    entering: tuple[Transfer, ...]
    moves: tuple[Transfer, ...]


def read_placement(function: Any, devices: Mapping[str, str] | None = None, default: str = "GPU:0") -> Reading:
    """Read where the operations of a compiled function run, or would run if its devices were GPUs.

    TensorFlow's wheel for Linux registers its GPU kernels on every machine, so no GPU is needed. What Keras traces only
    where there are GPUs, such as cuDNN's LSTM, is not in a graph that was traced without them.

    Args:
        function: A concrete function.
        devices: The GPU in place of each device, such as `{"CPU:1": "GPU:0"}`; all others are the host. None for
            the devices as they are.
        default: The GPU of operations that request no device.

    Example:
        >>> step = tf.function(lambda x: tf.raw_ops.UniqueV2(x=x * 2.0, axis=[0]).y + 1.0)
        >>> [(one.kind, one.device) for one in read_placement(step.get_concrete_function(tf.zeros([4]))).on_host]
        [('UniqueV2', 'CPU:0')]
    """
    captured = {inner.op.name: _device_of(outer.device, devices) for outer, inner in function.graph.captures}
    operations = lower(function.graph.as_graph_def())
    chosen = choose_devices(operations, lambda name: _device_of(name, devices), captured, default)
    return _read(PlacedGraph(operations, chosen))


def _device_of(name: str, devices: Mapping[str, str] | None) -> str:
    """Return the short name of a device."""
    short = name.rpartition("device:")[2].upper()
    if devices is not None:
        return devices.get(short, HOST)
    return short if short.startswith("GPU") else HOST


def _read(graph: PlacedGraph) -> Reading:
    placed = [Placed(one.kind, one.name, device) for one, device in zip(graph.operations, graph.devices, strict=True)]
    # A tensor is copied to a device once: only the first operation that reads it there counts.
    first_readers = {copy.output: copy for copy in reversed(graph.copies) if _is_wait(graph, copy)}
    return Reading(
        tuple(placed),
        tuple(placed[index] for index in sorted(_on_host(graph))),
        tuple(graph.transfer(copy) for copy in reversed(first_readers.values())),
        tuple(graph.transfer(copy) for copy in _detours(graph)),
        *_entries(graph),
        tuple(graph.transfer(copy) for copy in graph.copies if HOST not in (copy.origin, copy.target)),
    )


def _is_wait(graph: PlacedGraph, copy: Copy) -> bool:
    """Return whether the host waits for a GPU, other than for an operation that has no kernel there."""
    return copy.target == HOST and not graph.lacks_kernel[copy.consumer]


def _on_host(graph: PlacedGraph) -> set[int]:
    """Return operations without a kernel for GPUs that read what a GPU computed, and whose results return there."""
    down = {copy.consumer for copy in graph.copies if copy.target == HOST}
    up = {copy.output.operation for copy in graph.copies if copy.origin == HOST}
    before, after = collections.defaultdict(set), collections.defaultdict(set)
    for index, operation in enumerate(graph.operations):
        for number, output in enumerate(operation.inputs):
            if graph.origin(output) == graph.target(index, number) == HOST:
                after[output.operation].add(index)
                before[index].add(output.operation)
    found = _reached(down, after) & _reached(up, before)
    return {index for index in found if graph.lacks_kernel[index]}


def _reached(begin: set[int], neighbours: Mapping[int, set[int]]) -> set[int]:
    found, new = set(begin), set(begin)
    while new:
        new = set().union(*(neighbours.get(one, ()) for one in new)) - found
        found |= new
    return found


def _detours(graph: PlacedGraph) -> list[Copy]:
    """Return what operations that request no device send from one GPU to another, made of what they received."""
    received = {copy.consumer for copy in graph.copies if copy.target == graph.devices[copy.consumer] != HOST}
    for index, operation in enumerate(graph.operations):
        if not operation.requested and any(
            one.operation in received and graph.origin(one) == graph.target(index, number) != HOST
            for number, one in enumerate(operation.inputs)
        ):
            received.add(index)
    return [
        copy
        for copy in graph.copies
        if HOST not in (copy.origin, copy.target)
        and copy.output.operation in received
        and not graph.operations[copy.output.operation].requested
    ]


def _bundles(graph: PlacedGraph) -> set[Output]:
    """Return the bundles of tensors that the step made, and did not receive from its data."""
    found: set[Output] = set()
    for index, operation in enumerate(graph.operations):
        carried = operation.kind in _CARRYING and found.intersection(operation.inputs)
        if carried or operation.kind in _BUNDLES:
            types = enumerate(operation.signature.output_types)
            found.update(Output(index, number) for number, one in types if one == VARIANT)
    return found


def _entries(graph: PlacedGraph) -> tuple[dict[tuple[int, str], int], tuple[Transfer, ...]]:
    parts: dict[Output, frozenset[int]] = {}  # the tensors of the batch of which a tensor of the host is a part
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    bundles = _bundles(graph)
    for index, operation in enumerate(graph.operations):
        numbers = range(len(operation.signature.outputs))
        of_data = operation.kind in _OF_DATA and not bundles.intersection(operation.inputs)
        if of_data and graph.devices[index] != HOST:  # the whole batch enters there
            counts.update((number, graph.devices[index]) for number in numbers)
        moved = operation.inputs if operation.kind in _MOVING else ()
        of_inputs = frozenset(part for one in moved for part in parts.get(one, ()))
        for number in numbers:
            own = frozenset([number]) if of_data else of_inputs
            if own and graph.origin(Output(index, number)) == HOST:
                parts[Output(index, number)] = own
    entered = {(copy.output, copy.target): copy for copy in reversed(graph.copies) if copy.output in parts}
    counts.update((part, device) for output, device in entered for part in parts[output])
    return dict(sorted(counts.items())), tuple(graph.transfer(copy) for copy in reversed(entered.values()))
