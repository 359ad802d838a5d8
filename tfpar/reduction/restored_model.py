"""Contexts that restore a model's weights, states and random states after a run before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.random_numbers import fixed_random_ops, random_state


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Restore the model's weights and states at the end of this context, from copies in host memory."""
    before = [(variable, _copy(variable)) for variable in model.variables]
    try:
        yield
    finally:
        for variable, value in before:
            if not _equal(_copy(variable), value):
                variable.assign(value)


def _copy(variable: keras.Variable) -> tf.Tensor:
    """Return a variable's value in the memory of its host; a CPU copies it only when it changes."""
    memory = tf_distribute.local_memory(variable)
    if memory is None:
        return tf.convert_to_tensor(variable.numpy())
    with tf.device(tf_distribute.host_of(memory.device)):
        return tf.identity(memory.read_value())


def _equal(value: tf.Tensor, other: tf.Tensor) -> bool:
    """Return whether two values are equal, NaN included."""
    with tf.device(value.device):
        equal = tf.equal(value, other)
        if value.dtype.is_floating:
            equal |= tf.math.is_nan(value) & tf.math.is_nan(other)
        return bool(tf.reduce_all(equal))


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restore weights, states and random states after this context, in which typical values replace random ones."""
    with random_state.preserved_random_state(), restored(model), fixed_random_ops.fixed():
        yield
