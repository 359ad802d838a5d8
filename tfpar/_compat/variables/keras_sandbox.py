"""Variables of Keras with other memory for a while, so that code may read and change them without an effect.

Written for Keras 3.15, whose optimizers find the slots of a weight by its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.variables import keras_variables, sharded_memory


@contextlib.contextmanager
def sandboxed(
    model: keras.Model, variables: Sequence[Any], values: Mapping[int, tf.Tensor] | None = None
) -> Iterator[list[tf.Variable]]:
    """Give variables memory of their own inside this context: plain variables of this process with the same values.

    Args:
        model: The model, whose optimizers find their slots by the memory of its weights.
        variables: Its variables.
        values: Other values than the present ones, by the number of the variable.

    Yields:
        The memory of each variable.
    """
    present = [(values or {}).get(number, _value(variable)) for number, variable in enumerate(variables)]
    memories = [
        tf.Variable(value, trainable=bool(variable.trainable), name=variable.name)
        for variable, value in zip(variables, present, strict=True)
    ]
    before = [variable._value for variable in variables]
    _replace(model, variables, memories)
    try:
        yield memories
    finally:
        _replace(model, variables, before)


def _value(variable: Any) -> tf.Tensor:
    """Return the value of a variable on this process' first device; zeros where another process alone has it."""
    if sharded_memory.is_remote(variable):
        return tf.zeros(variable.shape, variable.dtype)
    memory = tf_distribute.first_memory(variable)
    return memory.read_value()


def _replace(model: keras.Model, variables: Sequence[Any], memories: Sequence[Any]) -> None:
    for variable, memory in zip(variables, memories, strict=True):
        variable._value = memory
    for optimizer in keras_variables.optimizers(model):
        keras_variables.find_slots(optimizer)
