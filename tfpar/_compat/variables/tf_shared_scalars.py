"""Common subexpression elimination for scalars while a graph is built.

TensorFlow 2.21 creates an operation for each call. Keras' Adam creates 42 per weight; 19 of them compute scalars that
are the same for all weights: constants, the step, powers of beta, the learning rate. They make up a quarter of the
operations in a training step of a transformer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.handle_data_util import get_resource_handle_data


class SharedScalars:
    """Scalars of a graph, shared between contexts.

    Shared are scalar constants, stateless operations on scalars, and reads of a scalar variable that has not changed
    since the last read. All values stay bitwise the same. Nothing is shared while a `tf.GradientTape` records, since it
    would add up the gradients of all uses.

    Example:
        >>> @tf.function
        ... def powers(x):
        ...     scalars = SharedScalars()
        ...     with scalars.shared():
        ...         first = x * 3.0
        ...     with scalars.shared():
        ...         return first is x * 3.0
        >>> bool(powers(tf.constant(2.0)))
        True
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[tf.Operation, list[Any]]] = {}
        self._writes: dict[int, int] = {}  # by the handle of a variable, which the operations in `_held` keep alive
        self._held: list[Any] = []

    @contextlib.contextmanager
    def shared(self, place: str = "") -> Iterator[None]:
        """Share scalars with other contexts of the same graph and place.

        Args:
            place: The device that reads the scalars. TensorFlow places a constant with its only reader.
        """
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        create = graph._create_op_internal

        def create_or_share(
            op_type: str, inputs: Any, dtypes: Any = None, input_types: Any = None, name: Any = None, attrs: Any = None,
            *others: Any, **named: Any,
        ) -> Any:  # fmt: skip
            key = self._key(graph, place, op_type, inputs, attrs)
            if key is not None and key in self._found:
                return self._found[key][0]
            op = create(op_type, inputs, dtypes, input_types, name, attrs, *others, **named)
            if key is not None:
                self._found[key] = (op, list(inputs))
            elif op_type != "ReadVariableOp":
                self._note_writes(inputs)
            return op

        with mock.patch.object(graph, "_create_op_internal", create_or_share):
            yield

    def _key(self, graph: Any, place: str, op_type: str, inputs: Any, attrs: Any) -> Any:
        """Return the cache key of an operation, or None if it cannot be shared."""
        if record.could_possibly_record():
            return None
        if op_type == "Const":
            if attrs["value"].tensor.tensor_shape.dim or attrs["value"].tensor.tensor_shape.unknown_rank:
                return None
        elif op_type == "ReadVariableOp":
            if not _is_scalar_variable(inputs[0]):
                return None
        elif not inputs or not all(map(_is_scalar, inputs)) or not _is_stateless(op_type):
            return None
        devices = _devices(graph)
        if devices is None:
            return None
        attributes = tuple(sorted((name, value.SerializeToString()) for name, value in (attrs or {}).items()))
        read = tuple((id(tensor), self._writes.get(id(tensor), 0)) for tensor in inputs)
        after = frozenset(map(id, graph._current_control_dependencies()))
        overridden = tuple(graph._gradient_override_map.items())
        return id(graph), place, devices, after, op_type, read, attributes, overridden

    def _note_writes(self, inputs: Any) -> None:
        """Record that an operation may change the variables whose handles it takes."""
        for tensor in inputs:
            if tensor.dtype != tf.resource:
                continue
            if isinstance(tensor, tf.__internal__.EagerTensor):  # a graph knows a variable by a tensor of its own
                self._found.clear()
            else:
                self._writes[id(tensor)] = self._writes.get(id(tensor), 0) + 1
                self._held.append(tensor)


def _is_stateless(op_type: str) -> bool:
    known = op_def_registry.get(op_type)  # None for a function of TensorFlow 1
    return known is not None and not known.is_stateful


def _is_scalar(tensor: Any) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and tensor.shape.rank == 0


def _is_scalar_variable(handle: Any) -> bool:
    if isinstance(handle, tf.__internal__.EagerTensor):
        return False
    known = get_resource_handle_data(handle)
    if len(known.shape_and_type) != 1:
        return False
    shape = known.shape_and_type[0].shape
    return not shape.dim and not shape.unknown_rank


def _devices(graph: Any) -> tuple[Any, ...] | None:
    """Return the device names and functions of the current scopes, or None inside a colocation scope."""
    if any(scope is not None for scope in graph._colocation_stack.peek_objs()):
        return None
    specs = graph._device_function_stack.peek_objs()
    return tuple(spec.display_name if spec.fast_string_merge else spec.function for spec in specs)
