"""Gradient functions of `tf.custom_gradient`, which TensorFlow keeps for as long as the process lives.

Written for TensorFlow 2.21. Each use of `tf.custom_gradient` in a graph registers a function under a name of its own
(`_graph_mode_decorator` in tensorflow/python/ops/custom_gradient.py), and nothing removes it again. It refers to the
tensors around it, so the graph of every step that was ever traced stays in memory, with its model: each that sums over
replicas (`ReplicaContext.all_reduce`) or has an activation such as `tf.nn.silu`.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

_PREFIX = "CustomGradient-"  # generate_name() in custom_gradient.py
_register = ops.RegisterGradient.__call__
_MOST_VALUES, _MOST_DEPTH, _MOST_BYTES = 1000, 40, 1 << 20


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


def gradient_key(name: str, of_tensor: Callable[[tf.Tensor], Hashable]) -> Hashable:
    """Return a key of a gradient function: functions with the same key compute the same.

    Two functions are the same that have the same code and see the same values: equal numbers, texts and arrays, tensors
    with the same key, functions that are the same in turn. Any other value is the same as itself alone, such as the
    layer whose method a function is. A function must not ask for names of operations, or for what others have noted on
    operations and tensors.

    Args:
        name: The name of its registration, the attribute `_gradient_op_type` of an operation.
        of_tensor: Returns the key of a tensor; None for one that is the same as itself alone.
    """
    found = name
    with contextlib.suppress(LookupError):
        found = ops.gradient_registry.lookup(name)
    return _Keys(of_tensor).key(found, ())


class _Itself:
    """A value that is equal to itself alone; it lives as long as its key."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Keys:
    """The keys of what a function sees: of the first thousand values, to a depth of 40; others equal themselves alone.

    Args:
        of_tensor: As for `gradient_key`.
    """

    def __init__(self, of_tensor: Callable[[tf.Tensor], Hashable]) -> None:
        self._of_tensor, self._remaining = of_tensor, _MOST_VALUES

    def key(self, value: Any, around: tuple[Any, ...]) -> Hashable:
        """Return the key of a value.

        Args:
            value: Any value.
            around: The values that it is a part of.
        """
        kind, known = type(value), None
        if isinstance(value, _Itself):
            return value
        if isinstance(value, tf.Tensor):
            known = self._of_tensor(value)
        elif value is None or kind in (bool, int, str, bytes, tf.DType):
            known = value
        elif kind in (float, complex) or isinstance(value, np.generic):
            known = repr(value)  # 0.0 equals -0.0, and NaN nothing
        elif kind is np.ndarray and not value.dtype.hasobject and value.nbytes <= _MOST_BYTES:
            known = value.dtype, value.shape, value.tobytes()
        else:
            return self._of_parts(value, kind, around)
        return _Itself(value) if known is None and value is not None else (kind, known)

    def _of_parts(self, value: Any, kind: type, around: tuple[Any, ...]) -> Hashable:
        for depth, outer in enumerate(around):
            if outer is value:  # a function that calls itself
                return "around", depth
        parts = _parts(value, kind)
        self._remaining -= 0 if parts is None else len(parts)
        if parts is None or self._remaining < 0 or len(around) > _MOST_DEPTH:
            return _Itself(value)
        return kind, tuple(self.key(one, (*around, value)) for one in parts)


def _parts(value: Any, kind: type) -> Sequence[Any] | None:
    """Return the values that determine a value; None for one of another kind."""
    if kind in (list, tuple):
        return tuple(value)
    if kind is dict:
        return [*value, *value.values()]
    if kind is weakref.ref:
        return [value()]
    if kind is functools.partial:
        return [value.func, value.args, value.keywords, vars(value)]
    if kind is types.FunctionType:
        itself = [_Itself(value.__code__), _Itself(value.__globals__)]
        return [*itself, value.__defaults__, value.__kwdefaults__, vars(value), *_cells(value)]
    return None


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """Return the values that a function has from the functions around it; one without a value is equal to no other."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield object()
