"""The forward and backward pass of each layer call of a model, traced by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model, random_state, tf_tapes
from tfpar.pipeline.graph import tracing
from tfpar.pipeline.graph.tracing import Call, Graph, Value
from tfpar.reduction.gradient_addition import dense_part

Found = TypeVar("Found")


class TracedCall(NamedTuple):
    """A layer call in a graph.

    Args:
        call: The layer call.
        size: The number of examples.
        given: A placeholder for each of its inputs.
        outputs: Its outputs.
        gradients: The gradients of its inputs and trained weights, as far as they have any.
        forward: The operations of the forward pass, in the order of their creation.
        backward: Those of the backward pass.
    """

    call: Call
    size: int
    given: dict[Value, Any]
    outputs: list[Any]
    gradients: list[Any]
    forward: list[tf.Operation]
    backward: list[tf.Operation]


@random_state.preserved_random_state()
def trace_calls(
    graph: Graph, inputs: Sequence[Any], size: int, device: str, read: Callable[[TracedCall], Found]
) -> list[Found]:
    """Trace both passes of each layer call, and return what a function reads in their graph.

    Args:
        graph: The model.
        inputs: The flat inputs of the model, `[examples, ...]` each, at least `size` examples.
        size: The number of examples.
        device: The device.
        read: Called with each call, in the order of the graph.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.ReLU()])
        >>> trace_calls(tracing.trace(model), [tf.zeros([2, 4])], 2, "CPU:0", lambda call: len(call.gradients))
        [2, 1]
    """
    found: list[Found] = []

    def trace() -> None:
        trained = set[Value]()
        values = {value: _input(one, size) for value, one in zip(graph.inputs, inputs, strict=True)}
        with tf.device(device):
            for call in graph.calls:
                traced = _traced(call, values, trained, size)
                found.append(read(traced))
                trained |= set(call.outputs) if traced.gradients else set()
                values.update(zip(call.outputs, traced.outputs, strict=True))

    tf.function(trace, autograph=False).get_concrete_function()
    return found


def _traced(call: Call, values: dict[Value, Any], trained: set[Value], size: int) -> TracedCall:
    graph = tf.compat.v1.get_default_graph()
    given = {
        value: keras_model.with_mask(_placeholder(values[value]), keras_model.mask_of(values[value]))
        for value in call.inputs
    }
    weights = {id(one): (one, tf.compat.v1.placeholder(one.dtype, one.shape)) for one in call.variables}
    begin = len(graph.get_operations())
    tensors: dict[Value, Any] = dict(given)
    with tf_tapes.replaced(list(weights.values())):
        tracing.run([call], tensors, training=True)
    middle = len(graph.get_operations())
    outputs = [tensors[value] for value in call.outputs]
    sources = [tensor for value, tensor in given.items() if value in trained]
    sources += [tensor for one, tensor in weights.values() if one.trainable]
    gradients = _gradients(outputs, sources)
    operations = graph.get_operations()
    return TracedCall(
        call=call,
        size=size,
        given=given,
        outputs=outputs,
        gradients=gradients,
        forward=operations[begin:middle],
        backward=operations[middle:],
    )


def _input(one: Any, size: int) -> Any:
    """Return a placeholder for a number of examples of an input."""
    if isinstance(one, tf.RaggedTensor | tf.SparseTensor):
        with tf.init_scope():
            rows = data.take_rows(one, 0, size)
        return _placeholder(rows)
    return tf.compat.v1.placeholder(tf.as_dtype(one.dtype), [size, *one.shape[1:]])


def _placeholder(tensor: Any) -> Any:
    """Return a placeholder for a tensor, or one for each part of a ragged or sparse tensor."""
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape), tensor, expand_composites=True
    )


def _gradients(outputs: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return the gradients of outputs by sources, as far as both have floats."""
    floating = [dense_part(one) for one in outputs if one.dtype.is_floating]
    trained = [dense_part(one) for one in sources if one.dtype.is_floating]
    if not floating or not trained:
        return []
    found = tf.gradients(floating, trained, [tf.ones_like(one) for one in floating])
    return [one for one in found if one is not None]
