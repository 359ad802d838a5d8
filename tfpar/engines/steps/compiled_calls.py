"""Calls of a model on a replica, whose forward and backward pass XLA compiles as one function each.

    batch ─► forward ─► outputs ─► loss ─► output gradients ─► backward ─► weight gradients ─► all-reduce
             └─XLA─┘               └ all-reduces               └ XLA ─┘

XLA cannot compile communication between replicas. In a `tf.xla.experimental.jit_scope`, TensorFlow 2.21 finds groups of
operations itself: 111 small compilations for 13 layers on two CPUs, instead of 8 for the two functions.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_graph
from tfpar._compat.models import keras_metrics, keras_model, keras_probabilities
from tfpar.reduction import objective
from tfpar.xla_choice import NotCompiledError


def suits(model: keras.Model) -> bool:
    """Return True if a call of a compiled model only returns outputs and updates variables.

    An overridden `compute_loss` may read tensors that `call` has stored in the model.
    """
    if objective.objectives_of(model) or keras_metrics.own_metrics(model):
        return False
    return not any(keras_model.overridden(model, name) for name in ("compute_loss", "compute_metrics"))


def groups_compiled(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return a context in which XLA compiles groups of operations, but not the collectives between them.

    Args:
        model: A model whose calls XLA cannot compile as a whole.

    Raises:
        NotCompiledError: If XLA was chosen automatically, not by the user.
    """
    if keras_model.is_chosen(model):
        raise NotCompiledError("a replica cannot run its forward pass as one function")
    scope: contextlib.AbstractContextManager[None] = tf.xla.experimental.jit_scope()
    return scope


def call_with_xla(model: keras.Model, inputs: Any, training: bool) -> Any:
    """Call a model on a replica of `tf.distribute.MirroredStrategy` as a function that XLA compiles.

    Three kinds of calls cannot be such a function, and TensorFlow chooses the operations that XLA compiles:

    - calls in which replicas communicate, as in synchronized BatchNormalization;
    - training calls with a loop, such as a recurrent layer, because the backward pass takes a list of tensors per loop,
      which XLA of TensorFlow 2.21 does not accept as an argument;
    - training calls that look up rows of a weight twice, because a function hides which rows of the gradient belong to
      which lookup.

    Args:
        model: A model that `suits` accepts, and whose layers add no losses.
        inputs: Inputs of the replica, `[examples, ...]` each.
        training: Whether the model trains.

    Returns:
        The outputs, `[examples, ...]` each, with their Keras masks.
    """
    communicates = []
    activations: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        communicates.append(True)
        raise RuntimeError(f"The replicas communicate in the call of {model.name!r}.")

    def call(inputs: Any) -> Any:
        outputs = keras_model.call_model(model, inputs, training)
        masks = tf.nest.map_structure(keras_model.mask_of, outputs)
        sent = [keras_probabilities.sent_as(output) for output in tf.nest.flatten(outputs)]
        activations[:] = [activation for _, activation in sent]
        return tf.nest.pack_sequence_as(outputs, [tensor for tensor, _ in sent]), masks

    try:
        with mock.patch.object(tf.distribute.ReplicaContext, "merge_call", refuse):
            compiled = tf.function(call, autograph=False, jit_compile=True)
            is_unsuited = training and _has_loops_or_repeated_lookups(compiled.get_concrete_function(inputs).graph)
            outputs, masks = (None, None) if is_unsuited else compiled(inputs)
    except Exception:
        if not communicates:
            raise
    if communicates or is_unsuited:
        with groups_compiled(model):
            return keras_model.call_model(model, inputs, training)
    received = list(map(keras_probabilities.received_as, tf.nest.flatten(outputs), activations))
    return tf.nest.map_structure(keras_model.with_mask, tf.nest.pack_sequence_as(outputs, received), masks)


def _has_loops_or_repeated_lookups(graph: Any) -> bool:
    gathers = [op for op in graph.get_operations() if op.type in ("GatherV2", "GatherNd", "ResourceGather")]
    sources = [_source(gather.inputs[0]) for gather in gathers]
    tables = [source for source in sources if source.dtype == tf.resource]
    return tf_graph.has_loops(graph) or len({table.ref() for table in tables}) < len(tables)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that a tensor is a plain read of; for the value of a variable, its handle."""
    return _source(tensor.op.inputs[0]) if tensor.op.type in ("Cast", "Identity", "ReadVariableOp") else tensor
