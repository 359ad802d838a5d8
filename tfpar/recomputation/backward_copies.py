"""Recomputation in a traced step: its backward pass reads copies of a layer's operations, which run when it needs them.

    forward    x ─► h ─► a ─► y ─► …         x and y are saved; h and a are freed after the layer
               └──────┐       │
    backward          x' ─► h' ─► a' ▼       x' is x once the gradient of y exists
               dx ◄── dh ◄─ da ◄──── dy

So a copy is never computed before the backward pass reaches the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_graph
from tfpar._compat.models import keras_remat
from tfpar.recomputation.recorded_calls import Recording

_SIZES = ("Rank", "Shape", "ShapeN", "Size")  # they run in the forward pass, and save no tensor


@contextlib.contextmanager
def recomputing(layers: Collection[keras.Layer], jit_compile: bool) -> Iterator[None]:
    """Let the backward passes that are traced in this context recompute layers, and those of a `keras.RematScope`.

    Eager steps recompute nothing.

    Args:
        layers: The layers to recompute.
        jit_compile: Whether XLA compiles the step.
    """
    recording = Recording()
    with keras_remat.recorded(recording.with_gradients, layers), recording.of_gradients():
        yield
    graphs = {id(span.graph): span.graph for span in recording.backward}
    for graph in graphs.values():
        with tf.control_dependencies(None):
            _recompute_calls(recording, graph, jit_compile)


def _recompute_calls(recording: Recording, graph: Any, jit_compile: bool) -> None:
    order = {op: index for index, op in enumerate(graph.get_operations())}
    starts = sorted(span.first for span in recording.backward if span.graph is graph)
    for call in recording.calls:
        later = [start for start in starts if start >= call.span.end]
        if call.span.graph is graph and call.gradients and later:
            repeated = call.repeated()
            copies = _Copies(repeated, call.gradients, jit_compile)
            for op, index in [reader for reader in _readers(repeated) if order.get(reader[0], 0) >= later[0]]:
                tf_graph.replace_input(op, index, copies.of(op.inputs[index]))


def _readers(repeated: Collection[tf.Operation]) -> Iterator[tuple[tf.Operation, int]]:
    """Yield each operation that reads a repeated one, with the index of the input."""
    outputs = [tensor for op in repeated for tensor in op.outputs]
    for reader in {reader for tensor in outputs for reader in tensor.consumers()}:
        if reader.type not in _SIZES:
            yield from ((reader, index) for index, tensor in enumerate(reader.inputs) if tensor.op in repeated)


class _Copies:
    """Copies of operations that run once some gradients exist.

    Args:
        repeated: The operations that may be copied; others are read.
        gradients: The gradients of a layer's outputs.
        jit_compile: Whether XLA compiles the step, which ignores control dependencies.
    """

    def __init__(self, repeated: Collection[tf.Operation], gradients: Sequence[tf.Tensor], jit_compile: bool) -> None:
        self._repeated, self._gradients, self._jit_compile = repeated, gradients, jit_compile
        self._tensors: dict[object, tf.Tensor] = {}

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a copy of the output of a repeated operation; of another tensor, its value after the gradients."""
        waiting = [tensor]
        while waiting:
            op = waiting[-1].op
            missing = [source for source in op.inputs if op in self._repeated and source.ref() not in self._tensors]
            if waiting[-1].ref() in self._tensors or not missing:
                self._copy(waiting.pop())
            else:
                waiting += missing
        return self._tensors[tensor.ref()]

    def _copy(self, tensor: tf.Tensor) -> None:
        if tensor.ref() in self._tensors:
            return
        if tensor.op not in self._repeated:
            self._tensors[tensor.ref()] = self._delayed(tensor)
            return
        inputs = [self._tensors[source.ref()] for source in tensor.op.inputs]
        with tf.control_dependencies(None if inputs else self._gradients):
            copy = tf_graph.copy_op(tensor.op, inputs)
        self._tensors |= {old.ref(): new for old, new in zip(tensor.op.outputs, copy.outputs, strict=True)}

    def _delayed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor once the gradients exist; a constant as it is."""
        if tensor.op.type == "Const" or tensor.dtype in (tf.resource, tf.variant):
            return tensor
        with tf.device(tensor.op.device or self._gradients[0].op.device):
            if self._jit_compile and tensor.dtype.is_floating:
                return tensor + tf.cast(_zero(self._gradients[0]), tensor.dtype)
            with tf.control_dependencies(self._gradients):
                return tf.identity(tensor)


def _zero(gradient: tf.Tensor) -> tf.Tensor:
    """Return a zero that XLA cannot compute before the gradient, as `tf.recompute_grad` does."""
    element = tf.reduce_max(tf.reshape(gradient, [-1])[:1])
    return tf.where(element == element, tf.zeros([], gradient.dtype), element)
