"""Order, devices, effects and costs of operations of a graph that exist already.

Written for TensorFlow 2.21. `tf.control_dependencies` orders operations only when they are created, and a
`tf.GradientTape` creates those of a backward pass all at once. `auto_control_deps` of TensorFlow uses the same method.
"""

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

# Operations that TensorFlow counts as stateful: they read a variable, check a value, or contain others.
_READS_AND_CALLS = {
    "ReadVariableOp",
    "ResourceGather",
    "VarHandleOp",
    "Assert",
    "If",
    "While",
    "StatefulPartitionedCall",
}
PYTHON = frozenset(["PyFunc", "EagerPyFunc", "PyFuncStateless"])  # functions of the Python process that traced them


def has_loops(graph: Any) -> bool:
    """Return whether a function has a loop, in the functions that it calls too.

    Args:
        graph: The graph of a concrete function.
    """
    return bool(operation_types(graph) & {"While", "StatelessWhile"})


def calls_python(graph: Any) -> bool:
    """Return whether a function calls one of Python, as by `tf.numpy_function`, in the functions that it calls too.

    Args:
        graph: The graph of a concrete function.
    """
    return bool(operation_types(graph) & PYTHON)


def operation_types(graph: Any) -> set[str]:
    """Return the types of the operations of a function, and of the functions that it calls.

    Args:
        graph: The graph of a concrete function.
    """
    whole = graph.as_graph_def()
    nodes = itertools.chain(whole.node, *(function.node_def for function in whole.library.function))
    return {node.op for node in nodes}


def called_graphs(op: tf.Operation) -> list[Any]:
    """Return the graphs of the functions that an operation calls, such as the branches of a condition.

    Args:
        op: An operation of the graph of a concrete function.
    """
    attributes = op.node_def.attr.values()
    names = [one.name for value in attributes for one in (*value.list.func, *[value.func] * value.HasField("func"))]
    return [versions.private(op.graph, "_get_function")(name).graph for name in names]


def run_before(first: tf.Operation, then: Sequence[tf.Operation]) -> None:
    """Run an operation before others of its graph, none of which it may depend on."""
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


def leave_checks_unordered() -> None:
    """Let the checks of the function that is being traced run in any order.

    TensorFlow 2.21 lets operations with effects run one after the other (`auto_control_deps.py`), checks among them. A
    check on one GPU would wait for that on another GPU, and so for all that the other has to compute before.
    """
    graph = tf.compat.v1.get_default_graph()
    for op in graph.get_operations():
        if op.type == "Assert":
            graph.experimental_acd_manager.run_independently(op)


def place_constants(op: tf.Operation, device: str) -> None:
    """Place the floating-point constants among the inputs of an operation that have no device yet.

    TensorFlow 2.21 folds constants between operations of one device alone. A constant elsewhere, on the first device,
    could change the last bit of a result.

    Args:
        op: An operation.
        device: Its device.
    """
    for tensor in op.inputs:
        if tensor.op.type == "Const" and tensor.dtype.is_floating and not tensor.op.device:
            tensor.op._set_device(device)


def assigns(kind: str) -> bool:
    """Return whether operations of a kind assign a variable.

    Args:
        kind: Such as "AssignAddVariableOp".
    """
    return kind.startswith(("Assign", "ResourceScatter", "ResourceStridedSlice"))


def effects(graph: Any) -> set[str]:
    """Return the kinds of operations of a graph, and of its functions, that do more than compute from what they read.

    Such are those that assign a variable, draw from a generator of TensorFlow, print, or run Python.

    Args:
        graph: The graph of a concrete function.
    """
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for one in definition.library.function for node in one.node_def)]
    names = {one.signature.name for one in definition.library.function}
    kinds = {node.op for node in nodes} - names - _READS_AND_CALLS
    return {kind for kind in kinds if (known := op_def_registry.get(kind)) is None or known.is_stateful}


def num_float_operations(graph: Any) -> float:
    """Return the floating-point operations of a graph.

    The counter of TensorFlow 2.21 calls a function that warns of its own deprecation (`flops_registry.py`), with advice
    that no caller can follow.

    Args:
        graph: The graph of a concrete function.
    """
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    with mock.patch.object(deprecation, "_PRINT_DEPRECATION_WARNINGS", False):
        return float(tf.compat.v1.profiler.profile(graph, options=options).total_float_ops)
