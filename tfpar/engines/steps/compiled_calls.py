"""Calls of a model on a replica, of which XLA compiles the forward and the backward pass as one function each.

    part ─► forward ─► outputs ─► loss ─► gradients of the outputs ─► backward ─► gradients of the weights ─► all-reduce
            └ XLA ┘               └ all-reduces                       └─ XLA ─┘

XLA cannot compile what the replicas communicate. In a `tf.xla.experimental.jit_scope`, TensorFlow 2.21 looks for groups
of operations by itself: 111 small compilations for 13 layers on two CPUs, where the two functions have 8.
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
    """Return whether a call of a model has no effects but its outputs and new values of its variables.

    An overridden `compute_loss` may read tensors that `call` has stored in the model.

    Args:
        model: A compiled model.
    """
    if objective.objectives_of(model) or keras_metrics.own_metrics(model):
        return False
    return not any(keras_model.overridden(model, name) for name in ("compute_loss", "compute_metrics"))


def groups_compiled(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return a context in which XLA compiles groups of operations: it cannot compile the collectives between them.

    Args:
        model: A model whose calls XLA cannot compile as a whole.

    Raises:
        NotCompiledError: If the user has not asked for XLA.
    """
    if keras_model.is_chosen(model):
        raise NotCompiledError("a replica cannot run its forward pass as one function")
    scope: contextlib.AbstractContextManager[None] = tf.xla.experimental.jit_scope()
    return scope


def call_with_xla(model: keras.Model, inputs: Any, training: bool) -> Any:
    """Call a model on a replica of `tf.distribute.MirroredStrategy` as a function that XLA compiles.

    A call in which the replicas communicate, as synchronized BatchNormalization does, cannot be such a function. Nor
    can one with a loop that trains, such as a recurrent layer: the backward pass takes a list of tensors for each loop,
    and XLA of TensorFlow 2.21 accepts none as an argument; nor one that looks up rows of a weight twice, as a function
    hides which rows of the gradient belong to which lookup. There TensorFlow chooses what XLA compiles.

    Args:
        model: A model that `suits` accepts, and whose layers add no losses.
        inputs: The inputs of the replica, `[examples, ...]` each.
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
            cannot = training and _has_loops_or_lookups(compiled.get_concrete_function(inputs).graph)
            outputs, masks = (None, None) if cannot else compiled(inputs)
    except Exception:
        if not communicates:
            raise
    if communicates or cannot:
        with groups_compiled(model):
            return keras_model.call_model(model, inputs, training)
    received = list(map(keras_probabilities.received_as, tf.nest.flatten(outputs), activations))
    return tf.nest.map_structure(keras_model.with_mask, tf.nest.pack_sequence_as(outputs, received), masks)


def _has_loops_or_lookups(graph: Any) -> bool:
    """Return whether a function has a loop, or several lookups of rows of one variable."""
    read = [
        _source(op.inputs[0]) for op in graph.get_operations() if op.type in ("GatherV2", "GatherNd", "ResourceGather")
    ]
    tables = [one for one in read if one.dtype == tf.resource]
    return tf_graph.has_loops(graph) or len({one.ref() for one in tables}) < len(tables)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Return what a tensor reads without a computation: for the value of a variable its memory."""
    return _source(tensor.op.inputs[0]) if tensor.op.type in ("Cast", "Identity", "ReadVariableOp") else tensor
