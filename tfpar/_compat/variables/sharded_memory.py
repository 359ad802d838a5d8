"""Memory of one Keras variable in shards, each on a device of its own.

    keras.Variable "dense/kernel" [512, 4096]
       └ _value: ShardedMemory ─┬ tf.Variable [512, 2048] on GPU:0
                                └ tf.Variable [512, 2048] on GPU:1

The variable keeps its object, name and path, so that checkpoints, saved files and callbacks see one weight. Written for
Keras 3.15 and TensorFlow 2.21: a `keras.Variable` has its memory in `_value` (keras/src/backend/tensorflow/core.py),
which it reads through `tf.convert_to_tensor` and `numpy` and changes through `assign`.
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
    """The memory of a variable in shards along one axis.

    Args:
        shards: A `tf.Variable` on each device, in the order of the axis.
        axis: The divided axis.
        unique_id: The key by which an optimizer finds the slots of the weight; None for that of the first shard.
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
        """The size of each shard along the divided axis."""
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
        """Refuse what needs the memory of the whole variable: Keras' own training, and exports."""
        raise ValueError(
            f"The memory of {self.name!r} is divided over devices. Keras' own fit, export and a tf.GradientTape of "
            "your own take it whole. Train with tfpar.fit or tfpar.Trainer; to export, or for gradients of your own, "
            "load the file that trainer.save writes."
        )

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        return self.handle

    @property
    def name(self) -> str:
        """The name of the variable."""
        return str(self.shards[0].name)

    def read_value(self) -> tf.Tensor:
        """Return the whole value, on the host in eager mode, and else on the first device."""
        with tf.device(_HOST if tf.executing_eagerly() else self.device):
            return tf.concat(list(map(read, self.shards)), self.axis)

    value = read_value

    def numpy(self) -> np.ndarray:
        """Return the whole value."""
        return np.concatenate([shard.numpy() for shard in self.shards], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole value in a type of NumPy."""
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the whole value for `tf.convert_to_tensor`."""
        value = self.read_value()
        return value if dtype is None else tf.convert_to_tensor(value, dtype)

    def assign(self, value: Any, **_: Any) -> ShardedMemory:
        """Set the value of each shard to its part of a whole value."""
        return self._change(value, lambda shard: shard.assign)

    def assign_add(self, value: Any, **_: Any) -> ShardedMemory:
        """Add to each shard its part of a whole value."""
        return self._change(value, lambda shard: shard.assign_add)

    def assign_sub(self, value: Any, **_: Any) -> ShardedMemory:
        """Subtract from each shard its part of a whole value."""
        return self._change(value, lambda shard: shard.assign_sub)

    def _change(self, value: Any, method: Callable[[tf.Variable], Callable[[tf.Tensor], Any]]) -> ShardedMemory:
        parts = split(tf.convert_to_tensor(value, self.dtype), self.sizes, self.axis)
        for shard, part in zip(self.shards, parts, strict=True):
            with tf.device(shard.device):
                method(shard)(tf.identity(part))
        return self


class RemoteMemory:
    """The memory of a slot of an optimizer in another process, which is neither read nor changed here.

    Args:
        slot: The slot, whose type and name are known.

    Attributes:
        holder: The rank of the process that holds it; None while the optimizer creates its slots, which may begin with
            other values than those of their creation.
        lent: A value that is read as its own; None for none.
    """

    def __init__(self, slot: Any) -> None:
        self.path, self.dtype = str(slot.path), tf.as_dtype(slot.dtype)
        self.holder: int | None = None
        self.lent: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """Return the value that is lent."""
        if self.lent is None:
            raise self._refusal("read")
        return self.lent

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the value that is lent for `tf.convert_to_tensor`."""
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Refuse a value; the holder sets its own when it creates the slot."""
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
    """Return the parts of a whole value, on the host in eager mode: no device may have the memory for all of it."""
    if not tf.executing_eagerly():
        return list(tf.split(value, sizes, axis))
    with tf.device(_HOST):
        return list(tf.split(tf.identity(value), sizes, axis))


def is_sharded(variable: Any) -> bool:
    """Return whether the memory of a Keras variable is in shards."""
    return isinstance(variable._value, ShardedMemory)


def place_shards(variable: Any, axis: int, sizes: Sequence[int], devices: Sequence[str]) -> None:
    """Allocate the memory of a Keras variable in shards, unless it has them; it keeps its value or initial value.

    Args:
        variable: A Keras variable, perhaps without memory yet.
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
    """Allocate the memory of a new Keras variable in shards, such as a slot of an optimizer.

    Args:
        variable: A Keras variable whose shape and type are known.
        initializer: Returns the initial values for a shape and a type, the same for each element.
        like: The memory of a variable with the same shape.
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
    """Return a Keras variable for each shard of a sharded variable; a list of the variable itself if it is not sharded.

    They have its name and path, and are the same objects as long as the variable has the same memory.
    """
    memory = variable._value
    if not isinstance(memory, ShardedMemory):
        return [variable]
    if not memory.variables:
        memory.variables = [copy.copy(variable) for _ in memory.shards]
    for number, (shard, values) in enumerate(zip(memory.variables, memory.shards, strict=True)):
        vars(shard).update(vars(variable))
        shard._value, shard._shape, shard._tfpar_shard = values, tuple(values.shape), (variable, number)
    return memory.variables


def whole_of(variable: Any) -> tuple[Any, int]:
    """Return the divided variable of a shard, and its shard; the variable itself and 0 for one that is no shard."""
    return shard_of(variable) or (variable, 0)


def shard_of(variable: Any) -> tuple[Any, int] | None:
    """Return the divided variable and the shard of a shard; None for another variable."""
    found: tuple[Any, int] | None = getattr(variable, "_tfpar_shard", None)
    return found


def handles_of(variable: Any) -> list[tf.Tensor]:
    """Return the resource of each shard of a Keras variable; one of a variable that is not divided."""
    return [memory.handle for memory in memories_of(variable)]


def read(shard: Any) -> tf.Tensor:
    """Return the value of a shard, a `tf.Variable` or, while a stage of a pipeline is traced, a tensor."""
    return shard.read_value() if isinstance(shard, tf.Variable) else shard


@contextlib.contextmanager
def replaced(memories: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Let variables have other memory, or tensors, and their shape, inside this context.

    Args:
        memories: Each variable with its memory.
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
    """Let variables have tensors as their values, or as those of their shards, inside this context.

    Args:
        shards: Lasting shards, all those of a variable in their order, each with a tensor on the device of the shard; a
            variable that is not divided is its own shard.
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
    """Let divided variables have the shape and memory of one of their shards inside this context.

    A `keras.StatelessScope` takes values of the shape of the variable only.

    Args:
        variables: Keras variables, divided or not.
        shard: The number of the shard.
        others: The values of variables that are not divided, by the variable's `id`, in place of their own.
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
    """Return the `tf.Variable` of each shard of a Keras variable; one for a variable that is not divided."""
    memory = variable._value
    return memory.shards if isinstance(memory, ShardedMemory) else (memory,)


def is_remote(variable: Any) -> bool:
    """Return whether another process holds a Keras variable."""
    return isinstance(variable._value, RemoteMemory)


@contextlib.contextmanager
def lent(arrays: Sequence[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Read variables of other processes as arrays inside this context.

    Args:
        arrays: The variables, each with its value.
    """
    try:
        for variable, array in arrays:
            variable._value.lent = array
        yield
    finally:
        for variable, _ in arrays:
            variable._value.lent = None


def lent_array(variable: Any) -> np.ndarray | None:
    """Return the array that is lent to a variable of another process, without a copy; None for other variables."""
    return variable._value.lent if is_remote(variable) else None
