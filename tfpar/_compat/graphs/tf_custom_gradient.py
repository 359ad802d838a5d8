"""Release of `tf.custom_gradient` functions, which TensorFlow 2.21 keeps until the process ends.

Each use of `tf.custom_gradient` in a graph registers a function under a new name (`_graph_mode_decorator` in
tensorflow/python/ops/custom_gradient.py) and never removes it. The function references the tensors around it, so every
traced graph that uses one, such as `ReplicaContext.all_reduce` or `tf.nn.silu`, stays in memory with its model.
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
    """From now on, keep gradient functions only as long as their graphs exist."""
    ops.RegisterGradient.__call__ = _register_in_graph


def _register_in_graph(registration: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    graph, name = ops.get_default_graph(), registration._op_type
    if not name.startswith(_PREFIX) or not isinstance(graph, FuncGraph):
        _register(registration, function)
        return function
    while isinstance(graph.outer_graph, FuncGraph):
        graph = graph.outer_graph  # owns the function: bodies of loops and branches may be copied
    reference = weakref.ref(function)

    def call(*arguments: Any) -> Any:
        gradient = reference()
        assert gradient is not None, "its graph exists while its gradient is computed"
        return gradient(*arguments)

    _register(registration, call)
    graph._tfpar_gradient_functions = [*getattr(graph, "_tfpar_gradient_functions", ()), function]
    weakref.finalize(graph, ops.gradient_registry._registry.pop, name, None).atexit = False
    return function


def num_results(name: str) -> int:
    """Return how many inputs of a custom-gradient op are results of its function.

    They precede the arguments and variables of the function. 0 if `tf.custom_gradient` did not register the gradient.

    Args:
        name: The registered name: the attribute `_gradient_op_type` of the op.
    """
    try:
        function: Any = ops.gradient_registry.lookup(name)
    except LookupError:
        return 0
    while isinstance(function, types.FunctionType):
        closure = dict(zip(function.__code__.co_freevars, _cells(function), strict=True))
        if "flat_result_len" in closure:
            return int(closure["flat_result_len"])
        reference = closure.get("reference")
        function = reference() if reference is not None else closure.get("tape_grad_fn")
    return 0


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values in a function's closure; an empty cell yields a new object."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield object()
