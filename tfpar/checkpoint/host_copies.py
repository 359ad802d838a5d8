"""Copies of GPU variables to host memory, all in one call.

In one compiled function the copies follow one another without waiting, those of several GPUs run at the same time, and
the GPUs check whether weights are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar.per_model import PerModel

KINDS = ("GPU",)  # of devices whose variables are copied
_HOST = "/device:CPU:0"


def copy_to_host(model: keras.Model, variables: dict[str, Any]) -> tuple[dict[str, np.ndarray], bool]:
    """Return the values of variables on GPUs, and whether the weights among them are finite.

    Args:
        model: The model, with which the compiled function is kept.
        variables: State variables by name; names of weights begin with `weights/`. Variables on CPUs, and variables
            whose replicas differ, are left out.

    Example:
        >>> copy_to_host(model, {})
        ({}, True)
    """
    memories = {name: tf_distribute.local_memory(variable) for name, variable in variables.items()}
    on_gpus = {name: memory for name, memory in memories.items() if memory is not None and _is_on_gpu(memory)}
    if not on_gpus:
        return {}, True
    copies = _copies.get(model)
    if copies is None or not copies.matches(list(on_gpus.values())):
        is_weight = [name.startswith("weights/") for name in on_gpus]
        copies = _copies[model] = _Copies(list(on_gpus.values()), is_weight)
    values, finite = copies.run()
    return {name: np.asarray(value) for name, value in zip(on_gpus, values, strict=True)}, bool(finite)


def copies_on(host: str, memories: Sequence[tf.Variable], checked: Sequence[bool]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Copy variables to a host, and return whether the checked ones are finite; for use in a traced function.

    Args:
        host: The CPU of a process.
        memories: Variables on any device of that process.
        checked: For each variable, whether its device checks that it is finite.
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
    """A compiled call of `copies_on` for some variables."""

    def __init__(self, memories: Sequence[tf.Variable], checked: Sequence[bool]) -> None:
        self._memories = memories
        self.run = tf.function(lambda: copies_on(_HOST, memories, checked), autograph=False)

    def matches(self, memories: Sequence[tf.Variable]) -> bool:
        """Return whether the function copies exactly these variables."""
        return list(map(id, memories)) == list(map(id, self._memories))


_copies: PerModel[_Copies] = PerModel()


def _is_on_gpu(memory: tf.Variable) -> bool:
    is_number = memory.dtype.is_floating or memory.dtype.is_integer
    return is_number and tf.DeviceSpec.from_string(memory.device).device_type in KINDS
