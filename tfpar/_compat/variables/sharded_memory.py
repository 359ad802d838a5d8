"""The memory of a Keras variable that is sharded over devices, or held by another process.

    keras.Variable "dense/kernel" [512, 4096]
       └ _value: ShardedMemory ─┬ tf.Variable [512, 2048] on GPU:0
                                └ tf.Variable [512, 2048] on GPU:1

Checkpoints, saved files and callbacks see one variable with its usual name and path.

Written for Keras 3.15 and TensorFlow 2.21: a `keras.Variable` stores its memory in `_value`
(keras/src/backend/tensorflow/core.py), reads it with `tf.convert_to_tensor` and `numpy`, and changes it with `assign`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

from tfpar._compat.variables import keras_weight_keys, tf_variable_names

_HOST = "/device:CPU:0"


class ShardedMemory:
    """The memory of a variable, sharded along one axis.

    Args:
        shards: A `tf.Variable` on each device, in their order along the axis.
        axis: The sharded axis.
        unique_id: The key under which an optimizer finds the slots of the weight. Defaults to that of the first shard.
    """

    def __init__(self, shards: Sequence[tf.Variable], axis: int, unique_id: str | None = None) -> None:
        self.shards, self.axis = tuple(shards), axis
        self._unique_id = unique_id or shards[0]._unique_id
        self.variables: list[Any] = []  # what `shards_of` returns

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.shards[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole variable."""
        sizes = self.shards[0].shape.as_list()
        sizes[self.axis] = sum(self.sizes)
        return tf.TensorShape(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each shard along the sharded axis."""
        return tuple(shard.shape[self.axis] for shard in self.shards)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return tuple(shard.device for shard in self.shards)

    @property
    def layout(self) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
        """The axis, and the size and device of each shard."""
        return self.axis, self.sizes, self.devices

    @property
    def device(self) -> str:
        """The device of the first shard."""
        return str(self.shards[0].device)

    @property
    def handle(self) -> tf.Tensor:
        """Refuse callers that need one `tf.Variable`: Keras' own training, and exports."""
        raise ValueError(
            f"The memory of {self.name!r} is sharded over devices. Keras' own fit, export and a tf.GradientTape of "
            "your own take it whole. Train with tfpar.fit or tfpar.Trainer, and export with trainer.export; for "
            "gradients of your own, load the file that trainer.save writes."
        )

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        return self.handle

    @property
    def name(self) -> str:
        """The name of the variable."""
        return str(self.shards[0].name)

    def read_value(self) -> tf.Tensor:
        """Return the whole value: on the host in eager mode, otherwise on the first device."""
        with tf.device(_HOST if tf.executing_eagerly() else self.device):
            return tf.concat(list(map(read, self.shards)), self.axis)

    value = read_value

    def numpy(self) -> np.ndarray:
        """Return the whole value."""
        return np.concatenate([shard.numpy() for shard in self.shards], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole value as a NumPy array."""
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the whole value for `tf.convert_to_tensor`."""
        value = self.read_value()
        return value if dtype is None else tf.convert_to_tensor(value, dtype)

    def assign(self, value: Any, **_: Any) -> ShardedMemory:
        """Assign a whole value to the shards."""
        return self._change(value, lambda shard: shard.assign)

    def assign_add(self, value: Any, **_: Any) -> ShardedMemory:
        """Add a whole value to the shards."""
        return self._change(value, lambda shard: shard.assign_add)

    def assign_sub(self, value: Any, **_: Any) -> ShardedMemory:
        """Subtract a whole value from the shards."""
        return self._change(value, lambda shard: shard.assign_sub)

    def _change(self, value: Any, method: Callable[[tf.Variable], Callable[[tf.Tensor], Any]]) -> ShardedMemory:
        parts = split(tf.convert_to_tensor(value, self.dtype), self.sizes, self.axis)
        for shard, part in zip(self.shards, parts, strict=True):
            with tf.device(shard.device):
                method(shard)(tf.identity(part))
        return self


class RemoteMemory:
    """Stands in for the memory of an optimizer slot that another process holds.

    Args:
        slot: The slot; its dtype and path are known.

    Attributes:
        holder: The rank of the process that holds the slot. None while the optimizer is built: it may then assign
            initial values, which are ignored here.
        lent: A value to read in place of the remote one, or None.
    """

    def __init__(self, slot: Any) -> None:
        self.path, self.dtype = str(slot.path), tf.as_dtype(slot.dtype)
        self.holder: int | None = None
        self.lent: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """Return the lent value."""
        if self.lent is None:
            raise self._refusal("read")
        return self.lent

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the lent value for `tf.convert_to_tensor`."""
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Ignore initial values while the optimizer is built, and refuse later ones."""
        if self.holder is not None:
            raise self._refusal("change")

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"Worker {self.holder} alone holds {self.path!r}, as the optimizer's state is sharded, and this worker "
            f"cannot {what} it. Save with trainer.save on all workers, with tfpar.Checkpoints, or with ModelCheckpoint "
            "at the end of epochs; resume with tfpar.Checkpoints."
        )


def _operator(name: str) -> Callable[..., Any]:
    def apply(memory: ShardedMemory, *others: Any) -> Any:
        return getattr(tf.convert_to_tensor(memory), name)(*map(_whole, others))

    return apply


def _whole(value: Any) -> Any:
    return value.read_value() if isinstance(value, ShardedMemory) else value


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(ShardedMemory, _name, _operator(_name))


def split(value: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
    """Split a whole value, in eager mode on the host: it may not fit on any device."""
    if not tf.executing_eagerly():
        return list(tf.split(value, sizes, axis))
    with tf.device(_HOST):
        return list(tf.split(tf.identity(value), sizes, axis))


def is_sharded(variable: Any) -> bool:
    """Return whether a Keras variable is sharded."""
    return isinstance(variable._value, ShardedMemory)


def place_shards(variable: Any, axis: int, sizes: Sequence[int], devices: Sequence[str]) -> None:
    """Shard the memory of a Keras variable, unless it is sharded like this already. Its value stays the same.

    Args:
        variable: A Keras variable. One without memory receives its initial value.
        axis: The axis to shard.
        sizes: The size of each shard along it.
        devices: The full name of the device of each shard.
    """
    memory = variable._value
    if isinstance(memory, ShardedMemory) and memory.layout == (axis, tuple(sizes), tuple(devices)):
        return
    keras_weight_keys.note_key(variable)
    with tf.init_scope(), tf.device(_HOST):
        if memory is None:
            value = tf.convert_to_tensor(variable._initializer(variable._shape, dtype=variable._dtype))
        else:
            value = tf.convert_to_tensor(memory)
        parts = split(value, sizes, axis)
    variable._value = ShardedMemory(_allocate(variable, parts, devices), axis, getattr(memory, "_unique_id", None))
    variable._initializer = None
    variable._tfpar_moves = getattr(variable, "_tfpar_moves", 0) + 1


def initialize_sharded(variable: Any, initializer: Callable[..., Any], like: ShardedMemory) -> None:
    """Allocate a new Keras variable, such as an optimizer slot, sharded like another one.

    Args:
        variable: A Keras variable without memory. Its shape and dtype are known.
        initializer: An initializer that gives every element the same value.
        like: The memory of a variable of the same shape.
    """
    with tf.init_scope(), tf.device(_HOST):
        parts = [initializer(tuple(shard.shape), dtype=variable._dtype) for shard in like.shards]
    variable._value = ShardedMemory(_allocate(variable, parts, like.devices), like.axis)


def _allocate(variable: Any, parts: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Variable]:
    shards = []
    for part, device in zip(parts, devices, strict=True):
        with tf.init_scope(), tf.device(device), tf_variable_names.scope_of(variable):
            shards.append(tf.Variable(part, dtype=variable._dtype, trainable=True, name=variable.name))
    return shards


def shards_of(variable: Any) -> list[Any]:
    """Return the shards of a variable as Keras variables, or the variable itself if it is not sharded.

    The shards have the name and path of the variable, and stay the same objects until its memory is replaced.
    """
    memory = variable._value
    if not isinstance(memory, ShardedMemory):
        return [variable]
    if not memory.variables:
        memory.variables = [copy.copy(variable) for _ in memory.shards]
    for number, (shard, values) in enumerate(zip(memory.variables, memory.shards, strict=True)):
        own = {"_value": values, "_shape": tuple(values.shape), "_tfpar_shard": (variable, number)}
        vars(shard).update({**vars(variable), **own})
    return memory.variables


def whole_of(variable: Any) -> tuple[Any, int]:
    """Return the variable that a shard belongs to and the index of the shard; for other variables themselves and 0."""
    return shard_of(variable) or (variable, 0)


def shard_of(variable: Any) -> tuple[Any, int] | None:
    """Return the variable that a shard belongs to and the index of the shard, or None for other variables."""
    whole: tuple[Any, int] | None = getattr(variable, "_tfpar_shard", None)
    return whole


def handles_of(variable: Any) -> list[tf.Tensor]:
    """Return the resource handle of each shard of a Keras variable."""
    return [memory.handle for memory in memories_of(variable)]


def read(shard: Any) -> tf.Tensor:
    """Return the value of a shard, which is a tensor while a pipeline stage is traced."""
    return shard.read_value() if isinstance(shard, tf.Variable) else shard


@contextlib.contextmanager
def replaced(memories: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Replace the memory of variables inside this context, by tensors or by other memory; they take its shape.

    Args:
        memories: Pairs of a variable and its new memory.
    """
    before = [(variable, variable._value, variable._shape) for variable, _ in memories]
    try:
        for variable, memory in memories:
            variable._value, variable._shape = memory, tuple(memory.shape)
        yield
    finally:
        for variable, memory, shape in before:
            variable._value, variable._shape = memory, shape


@contextlib.contextmanager
def with_values(shards: Sequence[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Replace the values of variables by tensors inside this context.

    Args:
        shards: Pairs of a variable from `shards_of` and a tensor on its device. A sharded variable needs all of its
            shards, in order.
    """
    values: dict[int, tuple[Any, list[tf.Tensor]]] = {}
    for shard, value in shards:
        variable, _ = whole_of(shard)
        values.setdefault(id(variable), (variable, []))[1].append(value)
    memories = []
    for variable, tensors in values.values():
        memory, (first, *_) = variable._value, tensors
        sharded = isinstance(memory, ShardedMemory)
        memories.append((variable, ShardedMemory(tensors, memory.axis, memory._unique_id) if sharded else first))
    with replaced(memories):
        yield


@contextlib.contextmanager
def as_shards(variables: Sequence[Any], shard: int, others: Mapping[int, tf.Tensor] | None = None) -> Iterator[None]:
    """Let a layer see one shard of each sharded variable inside this context.

    The variables also take the shape of the shard, which a `keras.StatelessScope` checks.

    Args:
        variables: Keras variables, sharded or not.
        shard: The index of the shard.
        others: Replacement values for variables that are not sharded, by the variable's `id`.
    """
    others = others or {}
    memories = [
        (variable, variable._value.shards[shard] if is_sharded(variable) else others[id(variable)])
        for variable in variables
        if is_sharded(variable) or id(variable) in others
    ]
    scope = get_stateless_scope().state_mapping if in_stateless_scope() else {}
    scoped = {key: scope[key] for key in others if key in scope}
    try:
        scope.update({key: others[key] for key in scoped})
        with replaced(memories):
            yield
    finally:
        scope.update(scoped)


def memories_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the `tf.Variable` of each shard of a Keras variable."""
    memory = variable._value
    return memory.shards if isinstance(memory, ShardedMemory) else (memory,)


def is_remote(variable: Any) -> bool:
    """Return whether another process holds a Keras variable."""
    return isinstance(variable._value, RemoteMemory)


@contextlib.contextmanager
def lent(arrays: Sequence[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Lend values to variables of other processes inside this context.

    Args:
        arrays: Pairs of a variable and its value.
    """
    try:
        for variable, array in arrays:
            variable._value.lent = array
        yield
    finally:
        for variable, _ in arrays:
            variable._value.lent = None


def lent_array(variable: Any) -> np.ndarray | None:
    """Return the value lent to a variable of another process, without a copy, or None for other variables."""
    return variable._value.lent if is_remote(variable) else None
