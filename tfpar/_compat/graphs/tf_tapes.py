"""Gradient tapes of user code, in traces where tensors replace variables (TensorFlow 2.21).

A tape watches a `tf.Variable` when it is read, and looks up its gradient by its handle (`GradientTape.gradient` in
tensorflow/python/eager/backprop.py). A tensor in its place is not watched and has no handle.
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
    """Return whether a tape or a `tf.autodiff.ForwardAccumulator` records in this thread."""
    return bool(record.could_possibly_record())


@contextlib.contextmanager
def replaced(pairs: Sequence[tuple[Any, tf.Tensor]], collect_losses: bool = False) -> Iterator[keras.StatelessScope]:
    """Replace variables with tensors in this context, also for gradient tapes.

    Args:
        pairs: Keras variables and the tensors to read in their place.
        collect_losses: As in `keras.StatelessScope`.

    Returns:
        The scope, which holds the values assigned in it.
    """
    with keras.StatelessScope(pairs, collect_losses=collect_losses) as scope, _watching(pairs):
        yield scope


@contextlib.contextmanager
def _watching(pairs: Sequence[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Make tapes that begin in this context watch the tensors, and return gradients for their variables."""
    tensors = {id(variable): tensor for variable, tensor in pairs}
    watched = [tensor for tensor in tensors.values() if tensor.dtype.is_floating]
    push = tf.GradientTape._push_tape

    def push_and_watch(tape: tf.GradientTape) -> None:
        push(tape)
        for tensor in watched if tape._watch_accessed_variables else ():
            tape.watch(tensor)

    def by_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            replacements = tf.nest.map_structure(lambda source: tensors.get(id(source), source), sources)
            return method(tape, target, replacements, *args, **kwargs)

        return call

    with (
        mock.patch.object(tf.GradientTape, "_push_tape", push_and_watch),
        mock.patch.object(tf.GradientTape, "gradient", by_tensors(tf.GradientTape.gradient)),
        mock.patch.object(tf.GradientTape, "jacobian", by_tensors(tf.GradientTape.jacobian)),
    ):
        yield


@contextlib.contextmanager
def losses_noted(note: Callable[[tf.Tensor], None]) -> Iterator[None]:
    """Call `note` with each loss whose gradients for Keras variables a tape computes in this context."""
    original = tf.GradientTape.gradient

    def gradient(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(source, keras.Variable | tf.Variable) for source in tf.nest.flatten(sources)):
            note(tf.add_n([tf.reduce_sum(value) for value in tf.nest.flatten(target)]))
        return original(tape, target, sources, *args, **kwargs)

    with mock.patch.object(tf.GradientTape, "gradient", gradient):
        yield
