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
    values = values or {}
    memories = [
        tf.Variable(
            values[number] if number in values else _value(variable), trainable=bool(variable.trainable),
            name=variable.name,
        )
        for number, variable in enumerate(variables)
    ]  # fmt: skip
    try:
        with sharded_memory.replaced(list(zip(variables, memories, strict=True))):
            _find_slots(model)
            yield memories
    finally:
        _find_slots(model)


def _value(variable: Any) -> tf.Tensor:
    """Return the value of a variable on this process' first device; zeros where another process alone has it."""
    if sharded_memory.is_remote(variable):
        return tf.zeros(variable.shape, variable.dtype)
    return tf_distribute.first_memory(variable).read_value()


def _find_slots(model: keras.Model) -> None:
    for optimizer in keras_variables.optimizers(model):
        keras_variables.find_slots(optimizer)
