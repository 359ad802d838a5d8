"""Copies of variables in the memory of the other process that holds them, which it writes to a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar.checkpoint import checksums, holders, host_copies
from tfpar.per_model import PerModel


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of variables in the memory of the process that holds these.

    Args:
        host: The CPU of that process.
        tensors: The copies by name.
        writer: The compiled function that writes them to a file.
    """

    host: str
    tensors: dict[str, tf.Tensor]
    writer: Any

    def write(self, prefix: str) -> list[str]:
        """Write the copies to a file, in the order of `tensors`, and return their checksums.

        Args:
            prefix: An absolute path in that process; TensorFlow appends a suffix.

        Raises:
            tf.errors.OpError: If the file cannot be written.
        """
        with tf.device(self.host):
            return checksums.to_hex(self.writer(tf.constant(prefix), *self.tensors.values()))


class _Holder:
    """The compiled functions that copy and write the variables of one process.

    Args:
        host: The CPU of the process.
        memories: The variables by name.
    """

    def __init__(self, host: str, memories: dict[str, tf.Variable]) -> None:
        self.host, self.memories = host, memories
        # Concrete functions, as TensorFlow warns about functions that are traced for many holders.
        with tf.device(host):
            self._copy = tf.function(self._copies, autograph=False).get_concrete_function()
        specs = [tf.TensorSpec(memory.shape, _stored_type(memory.dtype)) for memory in memories.values()]
        writer = tf.function(_write, autograph=False)
        self._writer = writer.get_concrete_function(tf.TensorSpec([], tf.string), *specs)

    def _copies(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        is_weight = [name.startswith("weights/") for name in self.memories]
        values, finite = host_copies.copies_on(self.host, list(self.memories.values()), is_weight)
        with tf.device(self.host):
            return [tf.cast(value, _stored_type(value.dtype)) for value in values], finite

    def copy(self) -> tuple[Copies, tf.Tensor]:
        """Return copies, and a tensor that is True if the weights among them are finite."""
        with tf.device(self.host):
            values, finite = self._copy()
        return Copies(self.host, dict(zip(self.memories, values, strict=True)), self._writer), finite


def _write(prefix: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
    """Write tensors to a file and return their checksums.

    `SaveV2` writes the bytes of tensors in the order of their names, without gaps
    (tensorflow/core/util/tensor_bundle/tensor_bundle.h), and an index file that is not needed here.
    """
    names = [f"{index:08d}" for index in range(len(tensors))]
    sums = [checksums.fingerprint(tensor) for tensor in tensors]
    written = tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(tensors), tensors=list(tensors)
    )
    with tf.control_dependencies([written]):
        return tf.concat(sums, axis=0)


def _stored_type(dtype: tf.DType) -> tf.DType:
    """Return the type in the file: float32 for bfloat16, which NumPy lacks."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


def copy(model: keras.Model, variables: Mapping[str, Any]) -> tuple[list[Copies], bool]:
    """Copy the variables of other processes in the memory of these, and return whether the weights are finite.

    Args:
        model: The model, with which the compiled functions are kept.
        variables: State variables by name; names of weights begin with `weights/`.

    Example:
        >>> copy(model, {})
        ([], True)
    """
    memories: dict[str, dict[str, tf.Variable]] = {}
    for name, host in holders.remote_hosts(variables).items():
        memories.setdefault(host, {})[name] = tf_distribute.local_memory(variables[name])
    model_holders = _holders.get(model)
    if model_holders is None or not _hold(model_holders, memories):
        model_holders = _holders[model] = [_Holder(host, variables) for host, variables in memories.items()]
    results = [holder.copy() for holder in model_holders]
    return [copies for copies, _ in results], all(bool(finite) for _, finite in results)


_holders: PerModel[list[_Holder]] = PerModel()


def _hold(model_holders: Sequence[_Holder], memories: Mapping[str, Mapping[str, tf.Variable]]) -> bool:
    """Return whether holders were compiled for exactly these variables."""

    def identities(variables: Mapping[str, tf.Variable]) -> list[tuple[str, int]]:
        return [(name, id(variable)) for name, variable in variables.items()]

    compiled = {holder.host: identities(holder.memories) for holder in model_holders}
    return compiled == {host: identities(variables) for host, variables in memories.items()}
