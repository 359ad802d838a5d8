"""The operations of recomputed layers, and those of the backward pass, in a graph that is being traced.

    layer call   x ─► h = x w ─► a = h³ ─► y = a v        saved: x and y, which other layers read
                      └───────────┴─ repeated             not repeated: y, reads of variables, random states

Stateless operations give the same results when they are repeated. All others run once: a layer draws the same random
numbers, and updates its moving statistics and metrics once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.models import keras_model

Function = Callable[..., Any]


class Span(NamedTuple):
    """Consecutive operations of a graph.

    Args:
        graph: The graph.
        first: Index of the first operation.
        end: Index after the last.
    """

    graph: Any
    first: int
    end: int

    @property
    def operations(self) -> list[tf.Operation]:
        """The operations, in order."""
        return list(self.graph.get_operations()[self.first : self.end])


class LayerCall(NamedTuple):
    """A recorded call of a layer.

    Args:
        span: The operations that were created during the call, on all replicas.
        outputs: The outputs of the call.
        gradients: The gradients of the outputs, once a backward pass is traced.
    """

    span: Span
    outputs: list[tf.Tensor]
    gradients: list[tf.Tensor]

    def repeated(self) -> set[tf.Operation]:
        """Return the operations that are repeated if the backward pass needs them."""
        saved = {tensor.op for tensor in self.outputs}
        return {op for op in self.span.operations if op not in saved and _is_repeatable(op)}


@dataclasses.dataclass
class Recording:
    """The layer calls and the backward passes of a step, as they are traced.

    Attributes:
        calls: The outermost recorded calls in graphs.
        backward: The operations of each `tf.GradientTape.gradient`.
    """

    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    backward: list[Span] = dataclasses.field(default_factory=list)
    _thread: threading.local = dataclasses.field(default_factory=threading.local)  # replicas are threads

    def record(self, function: Function) -> Function:
        """Return a function that also records the call, unless an enclosing call is recorded or it runs eagerly."""
        return self._recorded(function, lambda outputs, gradients: outputs)

    def with_gradients(self, function: Function) -> Function:
        """Do the same as `record`, and record the gradients of the outputs too."""
        return self._recorded(function, _noting_gradients)

    def _recorded(self, function: Function, passing: Callable[[Any, list[tf.Tensor]], Any]) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly() or getattr(self._thread, "is_inside", False):
                return function(*args, **kwargs)
            self._thread.is_inside = True
            try:
                outputs, span = _run(function, *args, **kwargs)
            finally:
                self._thread.is_inside = False
            self.calls.append(LayerCall(span, _tensors(outputs), []))
            return passing(outputs, self.calls[-1].gradients)

        return call

    @contextlib.contextmanager
    def of_gradients(self) -> Iterator[None]:
        """Record backward passes in this context, on all threads."""
        gradient = tf.GradientTape.gradient

        def recorded(tape: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                return gradient(tape, *args, **kwargs)
            gradients, span = _run(gradient, tape, *args, **kwargs)
            self.backward.append(span)
            return gradients

        with mock.patch.object(tf.GradientTape, "gradient", recorded):
            yield

    def repeated(self, graph: Any) -> set[tf.Operation]:
        """Return the operations of all calls in a graph that are repeated if the backward pass needs them."""
        return set().union(*(call.repeated() for call in self.calls if call.span.graph is graph))


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Span]:
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    results = function(*args, **kwargs)
    return results, Span(graph, first, len(graph.get_operations()))


def _noting_gradients(outputs: Any, noted: list[tf.Tensor]) -> Any:
    """Return the outputs of a layer, and add their gradients to a list when a backward pass reaches them."""

    def gradient(*gradients: Any) -> Any:
        noted.extend(tf.nest.flatten(gradients, expand_composites=True))
        return gradients

    leaves = keras.tree.flatten(outputs)
    floating = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
    if not floating:
        return outputs
    passed = tf.custom_gradient(lambda *tensors: (list(tensors), gradient))(*floating)
    copies = {id(leaf): copy for leaf, copy in zip(floating, passed, strict=True)}
    for leaf in floating:
        keras_model.copy_annotations(leaf, copies[id(leaf)])
    return keras.tree.pack_sequence_as(outputs, [copies.get(id(leaf), leaf) for leaf in leaves])


def _tensors(outputs: Any) -> list[tf.Tensor]:
    """Return the tensors of a layer's outputs; for probabilities also their logits, which the loss reads."""
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    leaves += map(keras_model.logits_of, keras.tree.flatten(outputs))
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and tf.is_symbolic_tensor(leaf)]


def _is_repeatable(op: tf.Operation) -> bool:
    return not op.op_def.is_stateful and op.type not in ("Const", "Placeholder")
