"""Copies of variables on GPUs in the memory of the host, all in one call.

Read one by one, each variable waits for its copy. In one function the copies follow one another without a wait, those
of several GPUs run at the same time, and the GPUs look whether weights are finite before they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar.per_model import PerModel

# The kinds of devices that need copies.
KINDS = ("GPU",)
_HOST = "/device:CPU:0"


def copy_to_host(model: keras.Model, variables: dict[str, Any]) -> tuple[dict[str, np.ndarray], bool]:
    """Return the values of those variables of a model that are on GPUs, and whether its weights among them are finite.

    Args:
        model: The model; the compiled function for its variables is kept with it.
        variables: State variables by name, weights with the prefix `weights/`. Variables of which each replica holds a
            part are left out.

    Returns:
        Arrays by name, and whether all weights among them are finite.

    Example:
        >>> copy_to_host(model, {})
        ({}, True)
    """
    memories = {name: tf_distribute.local_memory(variable) for name, variable in variables.items()}
    found = {name: memory for name, memory in memories.items() if memory is not None and _is_far(memory)}
    if not found:
        return {}, True
    copies = _copies.get(model)
    if copies is None or not copies.are_of(list(found.values())):
        is_weight = [name.startswith("weights/") for name in found]
        copies = _copies[model] = _Copies(list(found.values()), is_weight)
    values, finite = copies.run()
    return {name: np.asarray(value) for name, value in zip(found, values, strict=True)}, bool(finite)


def copies_on(host: str, memories: Sequence[tf.Variable], checked: Sequence[bool]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the values of variables on a host, and whether the checked ones are finite; in a traced function.

    Args:
        host: The CPU of a process.
        memories: Variables of that process, on any of its devices.
        checked: Whether to look at the numbers of a variable, on its device.
    """
    values, finite = [], [tf.constant(True)]
    for memory, is_checked in zip(memories, checked, strict=True):
        with tf.device(memory.device):
            value = memory.read_value()
            if is_checked and value.dtype.is_floating:
                finite.append(tf.reduce_all(tf.math.is_finite(value)))
        with tf.device(host):
            values.append(tf.identity(value))
    with tf.device(host):
        return values, tf.reduce_all(tf.stack(finite))


class _Copies:
    """A compiled function that copies some variables, and whether those that are checked are finite."""

    def __init__(self, memories: Sequence[tf.Variable], checked: Sequence[bool]) -> None:
        self._memories = memories

        self.run = tf.function(lambda: copies_on(_HOST, memories, checked), autograph=False)

    def are_of(self, memories: Sequence[tf.Variable]) -> bool:
        """Return whether the function copies these variables and no other ones."""
        return list(map(id, memories)) == list(map(id, self._memories))


_copies: PerModel[_Copies] = PerModel()


def _is_far(memory: tf.Variable) -> bool:
    is_number = memory.dtype.is_floating or memory.dtype.is_integer
    return is_number and tf.DeviceSpec.from_string(memory.device).device_type in KINDS
