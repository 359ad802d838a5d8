"""The tapes of users: around a call, and in the traces of stages and of losses, where tensors replace variables.

Written for TensorFlow 2.21. A tape records each function that is called inside its context
(`record.could_possibly_record` in tensorflow/python/eager/record.py). It watches a `tf.Variable` when it is read, and
takes the gradient by its handle (`GradientTape.gradient` in tensorflow/python/eager/backprop.py). A tensor in its place
is neither watched nor has a handle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.eager import record


def is_recording() -> bool:
    """Return whether a tape, or a `tf.autodiff.ForwardAccumulator`, records the operations of this thread."""
    return bool(record.could_possibly_record())


@contextlib.contextmanager
def replaced(pairs: Sequence[tuple[Any, tf.Tensor]], collect_losses: bool = False) -> Iterator[keras.StatelessScope]:
    """Replace variables by tensors inside this context, also for the tapes of users.

    Args:
        pairs: Keras variables, each with the tensor that code reads in its place.
        collect_losses: As for `keras.StatelessScope`.

    Returns:
        The scope, which has the values that are assigned inside.
    """
    with keras.StatelessScope(pairs, collect_losses=collect_losses) as scope, _watching(pairs):
        yield scope


@contextlib.contextmanager
def _watching(pairs: Sequence[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Let tapes that begin inside this context watch tensors, and take gradients by the variables of these."""
    tensors = {id(variable): tensor for variable, tensor in pairs}
    watched = [tensor for tensor in tensors.values() if tensor.dtype.is_floating]
    push = tf.GradientTape._push_tape

    def push_and_watch(tape: tf.GradientTape) -> None:
        push(tape)
        for tensor in watched if tape._watch_accessed_variables else ():
            tape.watch(tensor)

    def by_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            found = tf.nest.map_structure(lambda one: tensors.get(id(one), one), sources)
            return method(tape, target, found, *args, **kwargs)

        return call

    with (
        mock.patch.object(tf.GradientTape, "_push_tape", push_and_watch),
        mock.patch.object(tf.GradientTape, "gradient", by_tensors(tf.GradientTape.gradient)),
        mock.patch.object(tf.GradientTape, "jacobian", by_tensors(tf.GradientTape.jacobian)),
    ):
        yield
