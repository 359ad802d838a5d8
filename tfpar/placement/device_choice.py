"""The device of each operation, chosen as TensorFlow's placer does (`tensorflow/core/common_runtime/placer.cc`, 2.21).

resource handles      ─► all operations on one handle share the device of its variable
a requested device    ─► that device, if the operation has a kernel there; else the host
nothing requested     ─► the first GPU, if the operation has a kernel there; else the host
Shape, Size, Rank     ─► the device of their input, if nothing is requested
no input, as a Const  ─► the device of its consumers, if they share one
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from tfpar._compat import tf_kernels
from tfpar.placement.lowered_graph import RESOURCE, Operation

HOST = "CPU:0"
_METADATA = ("Shape", "ShapeN", "Size", "Rank")


def choose_devices(
    operations: Sequence[Operation], device_of: Callable[[str], str], arguments: Mapping[str, str], default: str
) -> list[str]:
    """Return the short name of the device of each operation.

    Args:
        operations: The operations of a lowered graph.
        device_of: Returns the short name of a requested device.
        arguments: The short name of the device of each input of the graph, by its name.
        default: The device of operations that request none, such as "GPU:0".
    """
    groups = _groups(operations)
    members = collections.defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    of_group = {
        group: _device_of_group([operations[index] for index in indices], device_of, arguments, default)
        for group, indices in members.items()
    }
    chosen = [of_group[group] for group in groups]
    is_free = [
        len(members[group]) == 1 and not operations[index].requested and operations[index].kind != "Argument"
        for index, group in enumerate(groups)
    ]
    consumers = _consumers(operations)
    for index, operation in enumerate(operations):
        if is_free[index] and operation.kind in _METADATA and has_kernel(operation, chosen[operation.inputs[0][0]]):
            chosen[index] = chosen[operation.inputs[0].operation]
    for index, operation in enumerate(operations):
        targets = {chosen[one] for one in consumers[index]}
        if is_free[index] and not operation.inputs and len(targets) == 1 and has_kernel(operation, min(targets)):
            chosen[index] = min(targets)
    return chosen


def has_kernel(operation: Operation, device: str) -> bool:
    """Return whether an operation can run on a device; all of them can on the host.

    Args:
        operation: An operation of a lowered graph.
        device: A short name.
    """
    if not device.startswith("GPU"):
        return True
    return tf_kernels.gpu_kernel(operation.kind, operation.signature.types) is not None


def _device_of_group(
    group: Sequence[Operation], device_of: Callable[[str], str], arguments: Mapping[str, str], default: str
) -> str:
    """Return the device that all operations of a group share."""
    for operation in group:
        if operation.kind == "Argument":
            return arguments.get(operation.name, HOST)
    wanted = next((device_of(operation.requested) for operation in group if operation.requested), default)
    return wanted if all(has_kernel(operation, wanted) for operation in group) else HOST


def _groups(operations: Sequence[Operation]) -> list[int]:
    """Return a number for each operation, equal for those that share a device."""
    parents = list(range(len(operations)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for index, operation in enumerate(operations):
        for other in operation.colocated:
            parents[root(index)] = root(other)
        for source, number in operation.inputs:
            if operations[source].signature.output_types[number] == RESOURCE:
                parents[root(index)] = root(source)
    return [root(index) for index in range(len(operations))]


def _consumers(operations: Sequence[Operation]) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in operations]
    for index, operation in enumerate(operations):
        for source, _ in operation.inputs:
            found[source].add(index)
    return found
