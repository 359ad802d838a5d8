"""Order, devices, side effects and costs of existing ops of a graph (TensorFlow 2.21)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import deprecation

from tfpar._compat import versions

# Stateful ops without side effects of their own: they read a variable, check a value, or contain other ops.
_READS_AND_CALLS = {
    "ReadVariableOp",
    "ResourceGather",
    "VarHandleOp",
    "Assert",
    "If",
    "While",
    "StatefulPartitionedCall",
}
PYTHON = frozenset(["PyFunc", "EagerPyFunc", "PyFuncStateless"])


def has_loops(graph: Any) -> bool:
    """Return whether a function's graph, or a function that it calls, contains a loop."""
    return bool(operation_types(graph) & {"While", "StatelessWhile"})


def calls_python(graph: Any) -> bool:
    """Return whether a function's graph, or a function that it calls, calls Python, as by `tf.numpy_function`."""
    return bool(operation_types(graph) & PYTHON)


def operation_types(graph: Any) -> set[str]:
    """Return the types of all ops of a function's graph and of the functions that it calls."""
    whole = graph.as_graph_def()
    nodes = itertools.chain(whole.node, *(function.node_def for function in whole.library.function))
    return {node.op for node in nodes}


def called_graphs(op: tf.Operation) -> list[Any]:
    """Return the graphs of the functions that an op calls, such as the branches of a condition."""
    functions = []
    for value in op.node_def.attr.values():
        functions += [*value.list.func, *[value.func] * value.HasField("func")]
    return [versions.private(op.graph, "_get_function")(function.name).graph for function in functions]


def run_before(first: tf.Operation, then: Sequence[tf.Operation]) -> None:
    """Add control dependencies between existing ops, which `tf.control_dependencies` cannot do.

    A `tf.GradientTape` creates all ops of a backward pass at once. TensorFlow's `auto_control_deps` uses this method
    too.
    """
    for op in then:
        op._add_control_inputs([first])


def after_all(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors that are ready when all operations of the calling replica have run that exist by now.

    TensorFlow 2.21's graph optimizer drops the order of a read and a later assignment of a variable where it removes
    the read's operation, such as for a gradient that does not need the weight.

    Args:
        tensors: Dense tensors, `tf.IndexedSlices` or None.
    """
    if tf.executing_eagerly():
        return list(tensors)
    graph, replica = tf.compat.v1.get_default_graph(), tf.distribute.get_replica_context()
    own = "" if replica is None else _replica_scope(f"replica_{replica._replica_id}/")
    ends = [
        op
        for op in graph.get_operations()
        if _replica_scope(op.name) == own and op.type not in _SOURCES and not any(out.consumers() for out in op.outputs)
    ]
    with tf.control_dependencies(ends):
        return [tf.nest.map_structure(tf.identity, tensor, expand_composites=True) for tensor in tensors]


_SOURCES = {"Const", "Placeholder", "NoOp"}


def _replica_scope(name: str) -> str:
    """Return the name scope of a replica other than the first, in which TensorFlow 2.21 names its operations."""
    match = re.search(r"(?:^|/)replica_([1-9]\d*)/", name)
    return match.group(1) if match else ""


def copy_op(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Add an op like another one to its graph, on the same device, with other inputs and without control inputs."""
    attributes = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
    types = [tensor.dtype for tensor in op.outputs]
    with tf.device(op.device):
        copy: tf.Operation = op.graph.create_op(op.type, inputs, types, name=f"{op.name}/again", attrs=attributes)
    return copy


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replace an input of an existing op, which `tf.GradientTape` has created.

    TensorFlow's own gradients of loops use this method too (`while_v2.py`).
    """
    op._update_input(index, tensor)


def leave_checks_unordered() -> None:
    """Exempt the assertions of the function being traced from the order of stateful ops.

    TensorFlow 2.21 serializes stateful ops, including assertions (`auto_control_deps.py`). An assertion on one GPU
    would wait for one on another GPU, and so for everything computed there before.
    """
    graph = tf.compat.v1.get_default_graph()
    for op in graph.get_operations():
        if op.type == "Assert":
            graph.experimental_acd_manager.run_independently(op)


def place_constants(op: tf.Operation, device: str) -> None:
    """Place an op's floating-point constant inputs on its device, unless they have one.

    TensorFlow 2.21 folds constants only between ops on the same device. A constant on another device, the first by
    default, could change the last bit of a result.
    """
    for tensor in op.inputs:
        if tensor.op.type == "Const" and tensor.dtype.is_floating and not tensor.op.device:
            tensor.op._set_device(device)


def assigns(kind: str) -> bool:
    """Return whether ops of a type, such as "AssignAddVariableOp", assign a variable."""
    return kind.startswith(("Assign", "ResourceScatter", "ResourceStridedSlice"))


def effects(graph: Any) -> set[str]:
    """Return the types of ops with side effects in a function's graph and the functions that it calls.

    Such ops assign a variable, advance a random generator, print, or run Python.
    """
    definition = graph.as_graph_def()
    functions = definition.library.function
    nodes = itertools.chain(definition.node, *(function.node_def for function in functions))
    names = {function.signature.name for function in functions}
    kinds = {node.op for node in nodes} - names - _READS_AND_CALLS
    return {kind for kind in kinds if (known := op_def_registry.get(kind)) is None or known.is_stateful}


def num_float_operations(graph: Any) -> float:
    """Return the floating-point operations of a function's graph.

    TensorFlow 2.21's counter calls a deprecated function (`flops_registry.py`), whose warning is suppressed.
    """
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    with mock.patch.object(deprecation, "_PRINT_DEPRECATION_WARNINGS", False):
        return float(tf.compat.v1.profiler.profile(graph, options=options).total_float_ops)
