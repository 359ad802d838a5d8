"""Copies of variables in the memory of the process that holds them, and the files that this process writes of them."""

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
    """Copies of variables in the memory of their holder.

    Args:
        host: The CPU of the holder.
        tensors: The copies by name.
        writer: The compiled function that writes them.
    """

    host: str
    tensors: dict[str, tf.Tensor]
    writer: Any

    def write(self, prefix: str) -> list[str]:
        """Write the copies to a file of their holder, in the order of `tensors`; return their checksums.

        Args:
            prefix: An absolute path, on the holder too; TensorFlow adds the number of the file to it.

        Raises:
            tf.errors.OpError: If they cannot be written.
        """
        with tf.device(self.host):
            return checksums.texts(self.writer(tf.constant(prefix), *self.tensors.values()))


class _Holder:
    """The compiled functions for the variables of one process.

    Args:
        host: The CPU of the process.
        memories: The variables by name.
    """

    def __init__(self, host: str, memories: dict[str, tf.Variable]) -> None:
        self.host, self.memories = host, memories
        # Concrete functions, as TensorFlow warns of a function that it traces for each of many holders.
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
        """Return copies, and whether the weights among them are finite, both in the memory of the holder.

        On a CPU a copy shares the memory of its variable until the variable is updated.
        """
        with tf.device(self.host):
            values, finite = self._copy()
        return Copies(self.host, dict(zip(self.memories, values, strict=True)), self._writer), finite


def _write(prefix: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
    """Write tensors one after another; return their checksums.

    `SaveV2` writes the bytes of tensors in the order of their names, without a gap
    (tensorflow/core/util/tensor_bundle/tensor_bundle.h), next to an index of its own that is not needed here.
    """
    names = [f"{index:08d}" for index in range(len(tensors))]
    sums = [checksums.of_bytes(tensor) for tensor in tensors]
    written = tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(tensors), tensors=list(tensors)
    )
    with tf.control_dependencies([written]):
        return tf.concat(sums, axis=0)


def _stored_type(dtype: tf.DType) -> tf.DType:
    """Return the type in which a variable is stored: float32 for bfloat16, which NumPy does not have."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


def copy(model: keras.Model, variables: Mapping[str, Any]) -> tuple[list[Copies], bool]:
    """Copy the variables of other processes in their own memory; return the copies, and whether weights are finite.

    Args:
        model: The model; the compiled functions for its variables are kept with it.
        variables: State variables by name, weights with the prefix `weights/`.

    Example:
        >>> copy(model, {})
        ([], True)
    """
    of_hosts: dict[str, dict[str, tf.Variable]] = {}
    for name, host in holders.hosts_of(variables).items():
        of_hosts.setdefault(host, {})[name] = tf_distribute.local_memory(variables[name])
    found = _holders.get(model)
    if found is None or not _are_of(found, of_hosts):
        found = _holders[model] = [_Holder(host, memories) for host, memories in of_hosts.items()]
    copies = [holder.copy() for holder in found]
    return [one for one, _ in copies], all(bool(finite) for _, finite in copies)


_holders: PerModel[list[_Holder]] = PerModel()


def _are_of(known_holders: Sequence[_Holder], of_hosts: Mapping[str, Mapping[str, tf.Variable]]) -> bool:
    known = {holder.host: [(name, id(memory)) for name, memory in holder.memories.items()] for holder in known_holders}
    return known == {host: [(name, id(one)) for name, one in found.items()] for host, found in of_hosts.items()}
