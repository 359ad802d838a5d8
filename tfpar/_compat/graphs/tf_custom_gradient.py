"""Gradient functions of `tf.custom_gradient`, which TensorFlow keeps for as long as the process lives.

Written for TensorFlow 2.21. Each use of `tf.custom_gradient` in a graph registers a function under a name of its own
(`_graph_mode_decorator` in tensorflow/python/ops/custom_gradient.py), and nothing removes it again. It refers to the
tensors around it, so the graph of every step that was ever traced stays in memory, with its model: each that sums over
replicas (`ReplicaContext.all_reduce`) or has an activation such as `tf.nn.silu`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

_PREFIX = "CustomGradient-"  # generate_name() in custom_gradient.py
_register = ops.RegisterGradient.__call__


def release_with_graphs() -> None:
    """Keep gradient functions registered after this call only as long as their graphs exist."""
    ops.RegisterGradient.__call__ = _register_in_graph


def _register_in_graph(registration: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    graph, name = ops.get_default_graph(), registration._op_type
    if not name.startswith(_PREFIX) or not isinstance(graph, FuncGraph):
        _register(registration, function)
        return function
    while isinstance(graph.outer_graph, FuncGraph):
        graph = graph.outer_graph  # the bodies of loops and branches may be copied: the whole counts
    held = weakref.ref(function)

    def call(*arguments: Any) -> Any:
        gradient = held()
        assert gradient is not None, "its graph exists while its gradient is computed"
        return gradient(*arguments)

    _register(registration, call)
    graph._tfpar_gradient_functions = [*getattr(graph, "_tfpar_gradient_functions", ()), function]
    weakref.finalize(graph, ops.gradient_registry._registry.pop, name, None).atexit = False
    return function


def num_results(name: str) -> int:
    """Return how many of the inputs of an operation are the results of a function with a gradient of its own.

    The others are its arguments, then its variables. 0 for a gradient that `tf.custom_gradient` did not register.

    Args:
        name: The name of its registration, the attribute `_gradient_op_type` of an operation.
    """
    try:
        function: Any = ops.gradient_registry.lookup(name)
    except LookupError:
        return 0
    while isinstance(function, types.FunctionType):
        seen = dict(zip(function.__code__.co_freevars, _cells(function), strict=True))
        if "flat_result_len" in seen:
            return int(seen["flat_result_len"])
        held = seen.get("held")
        function = held() if held is not None else seen.get("tape_grad_fn")
    return 0


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """Return the values that a function has from the functions around it; one without a value is equal to no other."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield object()
