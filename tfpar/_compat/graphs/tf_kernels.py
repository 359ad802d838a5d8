"""TensorFlow's GPU kernels of an op (TensorFlow 2.21), also on machines without a GPU.

The Linux wheel registers its GPU kernels on import, whatever devices there are. They are listed by
`tensorflow/python/framework/kernels.py` and `op_def_registry.py`, but not by the public API.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tensorflow.python.framework import kernels, op_def_registry

# The type attributes of an op, each with one DataType number or several for a list.
TypeAttributes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The GPU kernel of an op.

    Attributes:
        host_arguments: The names of inputs and outputs in host memory.
    """

    host_arguments: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a node.

    Attributes:
        types: The type attributes, which select a kernel.
        inputs: The argument name of each input.
        outputs: The argument name of each output.
        output_types: The DataType number of each output.
    """

    types: TypeAttributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_types: tuple[int, ...]


def op_def(operation: str) -> Any:
    """Return the OpDef of a registered op; None for the name of a function."""
    return op_def_registry.get(operation)


def signature(definition: Any, attributes: Mapping[str, Any]) -> Signature:
    """Return the inputs and outputs of a node.

    Args:
        definition: The OpDef of its op or function.
        attributes: `NodeDef.attr`; missing attributes have their defaults.
    """
    values = {attr.name: attr.default_value for attr in definition.attr} | dict(attributes)
    types = {attr.name: _types(values[attr.name]) for attr in definition.attr if attr.type in ("type", "list(type)")}
    inputs = [(arg.name, kind) for arg in definition.input_arg for kind in _expanded(arg, types, values)]
    outputs = [(arg.name, kind) for arg in definition.output_arg for kind in _expanded(arg, types, values)]
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
    """Return the GPU kernel of an op for its types, if there is one.

    Args:
        operation: The type of the op, such as "MatMul".
        types: The type attributes.

    Example:
        >>> gpu_kernel("UniqueV2", (("T", (1,)), ("Taxis", (9,)), ("out_idx", (3,)))) is None  # T is float32
        True
    """
    by_name = dict(types)
    matching = [
        kernel
        for kernel in kernels.get_registered_kernels_for_op(operation).kernel
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label and _fits(kernel, by_name)
    ]
    # TensorFlow uses a kernel for all devices only if the device has none of its own.
    chosen = next((kernel for kernel in matching if kernel.device_type == "GPU"), matching[0] if matching else None)
    return None if chosen is None else Kernel(frozenset(chosen.host_memory_arg))


def _fits(kernel: Any, types: Mapping[str, tuple[int, ...]]) -> bool:
    return all(
        set(types[constraint.name]) <= set(constraint.allowed_values.list.type)
        for constraint in kernel.constraint
        if constraint.name in types
    )
