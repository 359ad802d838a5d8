"""The kernels that TensorFlow has for an operation on GPUs (TensorFlow 2.21), on machines without a GPU as well.

The wheel for Linux registers its GPU kernels when it is imported, whatever devices there are. The public API does not
list them: `tensorflow/python/framework/kernels.py` and `op_def_registry.py` do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tensorflow.python.framework import kernels, op_def_registry

# A type attribute of an operation: one DataType number, or those of a list.
TypeAttributes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of an operation on GPUs.

    Attributes:
        host_arguments: The names of the inputs and outputs that lie in the memory of the host.
    """

    host_arguments: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one operation of a graph.

    Attributes:
        types: Its type attributes, by which TensorFlow chooses a kernel.
        inputs: The name of the argument of each input.
        outputs: The name of the argument of each output.
        output_types: The DataType number of each output.
    """

    types: TypeAttributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_types: tuple[int, ...]


def op_def(operation: str) -> Any:
    """Return the OpDef of a registered operation; None for the name of a function."""
    return op_def_registry.get(operation)


def signature(definition: Any, attributes: Mapping[str, Any]) -> Signature:
    """Return the inputs and outputs of a node.

    Args:
        definition: The OpDef of its operation or function.
        attributes: Its attributes, `NodeDef.attr`; those that it lacks have the defaults of the operation.
    """
    values = {one.name: one.default_value for one in definition.attr} | dict(attributes)
    types = {one.name: _types(values[one.name]) for one in definition.attr if one.type in ("type", "list(type)")}
    inputs = [(one.name, kind) for one in definition.input_arg for kind in _expanded(one, types, values)]
    outputs = [(one.name, kind) for one in definition.output_arg for kind in _expanded(one, types, values)]
    return Signature(
        tuple(sorted(types.items())),
        tuple(name for name, _ in inputs),
        tuple(name for name, _ in outputs),
        tuple(kind for _, kind in outputs),
    )


def _types(value: Any) -> tuple[int, ...]:
    return (value.type,) if value.WhichOneof("value") == "type" else tuple(value.list.type)


def _expanded(argument: Any, types: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the type of each tensor of an argument."""
    if argument.type_list_attr:
        return types[argument.type_list_attr]
    kind = types[argument.type_attr] if argument.type_attr else (argument.type,)
    return kind * (values[argument.number_attr].i if argument.number_attr else 1)


@functools.cache
def gpu_kernel(operation: str, types: TypeAttributes) -> Kernel | None:
    """Return the kernel of an operation on GPUs for its types; None without one.

    Args:
        operation: Its name, such as "MatMul".
        types: Its type attributes.

    Example:
        >>> gpu_kernel("UniqueV2", (("T", (1,)), ("Taxis", (9,)), ("out_idx", (3,)))) is None  # T is float32
        True
    """
    given = dict(types)
    found = [
        one
        for one in kernels.get_registered_kernels_for_op(operation).kernel
        if one.device_type in ("GPU", "DEFAULT") and not one.label and _fits(one, given)
    ]
    # TensorFlow takes a kernel for all devices only where the device has none of its own.
    chosen = next((one for one in found if one.device_type == "GPU"), found[0] if found else None)
    return None if chosen is None else Kernel(frozenset(chosen.host_memory_arg))


def _fits(kernel: Any, types: Mapping[str, tuple[int, ...]]) -> bool:
    return all(
        set(types[one.name]) <= set(one.allowed_values.list.type) for one in kernel.constraint if one.name in types
    )
