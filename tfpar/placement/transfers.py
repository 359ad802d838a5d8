"""The copies between places that a placement causes: the memory of the host and that of each GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfpar._compat import tf_kernels
from tfpar.placement.device_choice import HOST, has_kernel
from tfpar.placement.lowered_graph import RESOURCE, Operation, Output


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that is copied between two places.

    Attributes:
        source: The name of the operation that computes it.
        source_kind: The kind of that operation, such as "Shape".
        dtype: The type of the tensor, such as "int64".
        origin: Where it lies: a short name of a GPU, or "CPU:0" for the memory of the host.
        consumer: The name of an operation that reads it.
        consumer_kind: The kind of that operation.
        argument: The input of the consumer.
        target: Where the consumer reads it.
    """

    source: str
    source_kind: str
    dtype: str
    origin: str
    consumer: str
    consumer_kind: str
    argument: str
    target: str

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{self.source_kind} {self.source} ({self.dtype}, {self.origin}) -> "
            f"{self.consumer_kind} {self.consumer}, {self.argument} ({self.target})"
        )


@dataclasses.dataclass(frozen=True)
class Copy:
    """An input of an operation that is read in another place than it was computed in.

    Attributes:
        output: What is read.
        origin: Where it lies.
        consumer: The index of the operation that reads it.
        number: The number of the input.
        target: Where it is read.
    """

    output: Output
    origin: str
    consumer: int
    number: int
    target: str


class PlacedGraph:
    """A lowered graph with the device of each operation, and the memory of each tensor.

    Args:
        operations: The operations.
        devices: Their devices; "CPU:0" is the host.
    """

    def __init__(self, operations: Sequence[Operation], devices: Sequence[str]) -> None:
        self.operations, self.devices = operations, devices
        pairs = list(zip(operations, devices, strict=True))
        self._host_arguments = [_host_arguments(operation, device) for operation, device in pairs]
        self.lacks_kernel = [
            not has_kernel(operation, "GPU:0") and operation.kind != "Argument" for operation in operations
        ]
        self.copies = list(self._copies())

    def origin(self, output: Output) -> str:
        """Return where an output lies."""
        return self._place(output.operation, self.operations[output.operation].signature.outputs[output.number])

    def target(self, index: int, number: int) -> str:
        """Return where an operation reads an input."""
        return self._place(index, self.operations[index].signature.inputs[number])

    def transfer(self, copy: Copy) -> Transfer:
        """Return a copy with the names of its operations."""
        source, consumer = self.operations[copy.output.operation], self.operations[copy.consumer]
        dtype = tf.as_dtype(source.signature.output_types[copy.output.number]).name
        argument = consumer.signature.inputs[copy.number]
        return Transfer(
            source.name, source.kind, dtype, copy.origin, consumer.name, consumer.kind, argument, copy.target
        )

    def _place(self, index: int, argument: str) -> str:
        return HOST if argument in self._host_arguments[index] else self.devices[index]

    def _copies(self) -> Iterator[Copy]:
        for index, operation in enumerate(self.operations):
            for number, output in enumerate(operation.inputs):
                # A handle of a variable is a name of it, which every place knows.
                if self.operations[output.operation].signature.output_types[output.number] == RESOURCE:
                    continue
                origin, target = self.origin(output), self.target(index, number)
                if origin != target:
                    yield Copy(output, origin, index, number, target)


def _host_arguments(operation: Operation, device: str) -> frozenset[str]:
    kernel = tf_kernels.gpu_kernel(operation.kind, operation.signature.types) if device != HOST else None
    return kernel.host_arguments if kernel is not None else frozenset()
