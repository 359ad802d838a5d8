"""Memory of one Keras variable in pieces, each on a device of its own.

    keras.Variable "dense/kernel" [512, 4096]
       └ _value: DividedMemory ─┬ tf.Variable [512, 2048] on GPU:0
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


class DividedMemory:
    """The memory of a variable in pieces along one axis.

    Args:
        pieces: A `tf.Variable` on each device, in the order of the axis.
        axis: The divided axis.
        unique_id: The key by which an optimizer finds the slots of the weight; None for that of the first piece.
    """

    def __init__(self, pieces: Sequence[tf.Variable], axis: int, unique_id: str | None = None) -> None:
        self.pieces, self.axis = tuple(pieces), axis
        self._unique_id = unique_id or pieces[0]._unique_id

        self.variables: list[Any] = []  # what `lasting_pieces` returns

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.pieces[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole variable."""
        sizes = self.pieces[0].shape.as_list()
        sizes[self.axis] = sum(self.sizes)
        return tf.TensorShape(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each piece along the divided axis."""
        return tuple(piece.shape[self.axis] for piece in self.pieces)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each piece."""
        return tuple(piece.device for piece in self.pieces)

    @property
    def device(self) -> str:
        """The device of the first piece."""
        return str(self.pieces[0].device)

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
        return str(self.pieces[0].name)

    def read_value(self) -> tf.Tensor:
        """Return the whole value, on the host in eager mode, and else on the first device."""
        with tf.device(_HOST if tf.executing_eagerly() else self.device):
            return tf.concat(list(map(read, self.pieces)), self.axis)

    value = read_value

    def numpy(self) -> np.ndarray:
        """Return the whole value."""
        return np.concatenate([piece.numpy() for piece in self.pieces], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole value in a type of NumPy."""
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the whole value for `tf.convert_to_tensor`."""
        value = self.read_value()
        return value if dtype is None else tf.convert_to_tensor(value, dtype)

    def assign(self, value: Any, **_: Any) -> DividedMemory:
        """Set the value of each piece to its part of a whole value."""
        return self._change(value, lambda piece: piece.assign)

    def assign_add(self, value: Any, **_: Any) -> DividedMemory:
        """Add to each piece its part of a whole value."""
        return self._change(value, lambda piece: piece.assign_add)

    def assign_sub(self, value: Any, **_: Any) -> DividedMemory:
        """Subtract from each piece its part of a whole value."""
        return self._change(value, lambda piece: piece.assign_sub)

    def _change(self, value: Any, method: Callable[[tf.Variable], Callable[[tf.Tensor], Any]]) -> DividedMemory:
        parts = split(tf.convert_to_tensor(value, self.dtype), self.sizes, self.axis)
        for piece, part in zip(self.pieces, parts, strict=True):
            with tf.device(piece.device):
                method(piece)(tf.identity(part))
        return self


def _operator(name: str) -> Callable[..., Any]:
    def apply(memory: DividedMemory, *others: Any) -> Any:
        return getattr(tf.convert_to_tensor(memory), name)(*map(_whole, others))

    return apply


def _whole(value: Any) -> Any:
    return value.read_value() if isinstance(value, DividedMemory) else value


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(DividedMemory, _name, _operator(_name))


def split(value: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
    """Return the parts of a whole value, on the host in eager mode: no device may have the memory for all of it."""
    if not tf.executing_eagerly():
        return list(tf.split(value, sizes, axis))
    with tf.device(_HOST):
        return list(tf.split(tf.identity(value), sizes, axis))


def is_divided(variable: Any) -> bool:
    """Return whether the memory of a Keras variable is in pieces."""
    return isinstance(variable._value, DividedMemory)


def is_divided_as(variable: Any, axis: int, sizes: Sequence[int], devices: Sequence[str]) -> bool:
    """Return whether a Keras variable has these pieces.

    Args:
        variable: A Keras variable.
        axis: The divided axis.
        sizes: The size of each piece along it.
        devices: The full name of the device of each piece.
    """
    memory = variable._value
    if not isinstance(memory, DividedMemory):
        return False
    return (memory.axis, memory.sizes, memory.devices) == (axis, tuple(sizes), tuple(devices))


def divide(variable: Any, axis: int, sizes: Sequence[int], devices: Sequence[str]) -> None:
    """Allocate the memory of a Keras variable in pieces; it keeps its value, or has its initial value.

    Args:
        variable: A Keras variable, perhaps without memory yet.
        axis: The axis to divide.
        sizes: The size of each piece along it.
        devices: The device of each piece.
    """
    memory = variable._value
    keras_weight_keys.note_key(variable)
    with tf.init_scope(), tf.device(_HOST):
        if memory is None:
            value = tf.convert_to_tensor(variable._initializer(variable._shape, dtype=variable._dtype))
        else:
            value = tf.convert_to_tensor(memory)
        parts = split(value, sizes, axis)
    variable._value = DividedMemory(_allocate(variable, parts, devices), axis, getattr(memory, "_unique_id", None))
    variable._initializer = None
    variable._tfpar_moves = getattr(variable, "_tfpar_moves", 0) + 1


def initialize_divided(variable: Any, initializer: Callable[..., Any], like: DividedMemory) -> None:
    """Allocate the memory of a new Keras variable in pieces, such as a slot of an optimizer.

    Args:
        variable: A Keras variable whose shape and type are known.
        initializer: Returns the initial values for a shape and a type, the same for each element.
        like: The memory of a variable with the same shape.
    """
    with tf.init_scope(), tf.device(_HOST):
        parts = [initializer(tuple(piece.shape), dtype=variable._dtype) for piece in like.pieces]
    variable._value = DividedMemory(_allocate(variable, parts, like.devices), like.axis)


def _allocate(variable: Any, parts: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Variable]:
    pieces = []
    for part, device in zip(parts, devices, strict=True):
        with tf.init_scope(), tf.device(device), tf_variable_names.scope_of(variable):
            pieces.append(tf.Variable(part, dtype=variable._dtype, trainable=True, name=variable.name))
    return pieces


def pieces_of(variable: Any) -> list[Any]:
    """Return a Keras variable for each piece of a divided variable, with its name and path; or the variable itself."""
    memory = variable._value
    if not isinstance(memory, DividedMemory):
        return [variable]
    found = []
    for shard, piece in enumerate(memory.pieces):
        part = copy.copy(variable)
        part._value, part._shape, part._tfpar_piece = piece, tuple(piece.shape), (variable, shard)
        found.append(part)
    return found


def whole_of(variable: Any) -> tuple[Any, int]:
    """Return the divided variable of a piece, and its shard; the variable itself and 0 for one that is no piece."""
    return piece_of(variable) or (variable, 0)


def lasting_pieces(variable: Any) -> list[Any]:
    """Return what `pieces_of` returns, the same objects as long as the variable has the same memory."""
    memory = variable._value
    if not isinstance(memory, DividedMemory):
        return [variable]
    if not memory.variables:
        memory.variables = pieces_of(variable)
    for piece in memory.variables:
        piece._trainable = variable._trainable
    return memory.variables


def piece_of(variable: Any) -> tuple[Any, int] | None:
    """Return the divided variable and the shard of a piece; None for another variable."""
    found: tuple[Any, int] | None = getattr(variable, "_tfpar_piece", None)
    return found


def handles_of(variable: Any) -> list[tf.Tensor]:
    """Return the resource of each piece of a Keras variable; one of a variable that is not divided."""
    return [memory.handle for memory in memories_of(variable)]


def read(piece: Any) -> tf.Tensor:
    """Return the value of a piece, a `tf.Variable` or, while a stage of a pipeline is traced, a tensor."""
    return piece.read_value() if isinstance(piece, tf.Variable) else piece


@contextlib.contextmanager
def with_values(pieces: Sequence[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Let variables have tensors as their values, or as those of their pieces, inside this context.

    Args:
        pieces: Lasting pieces, all those of a variable in their order, each with a tensor on the device of the shard; a
            variable that is not divided is its own piece.
    """
    values: dict[int, tuple[Any, list[tf.Tensor]]] = {}
    for piece, value in pieces:
        variable, _ = whole_of(piece)
        values.setdefault(id(variable), (variable, []))[1].append(value)
    before = [(variable, variable._value) for variable, _ in values.values()]
    try:
        for variable, tensors in values.values():
            memory, (first, *_) = variable._value, tensors
            is_divided = isinstance(memory, DividedMemory)
            variable._value = DividedMemory(tensors, memory.axis, memory._unique_id) if is_divided else first
        yield
    finally:
        for variable, memory in before:
            variable._value = memory


@contextlib.contextmanager
def as_pieces(variables: Sequence[Any], shard: int, others: Mapping[int, tf.Tensor] | None = None) -> Iterator[None]:
    """Let divided variables have the shape and memory of one of their pieces inside this context.

    A `keras.StatelessScope` takes values of the shape of the variable only.

    Args:
        variables: Keras variables, divided or not.
        shard: The number of the piece.
        others: The values of variables that are not divided, by the variable's `id`, in place of their own.
    """
    before = [(variable, variable._value, variable._shape) for variable in variables]
    scope = get_stateless_scope() if in_stateless_scope() else None
    scoped = (
        {} if scope is None else {key: scope.state_mapping[key] for key in others or {} if key in scope.state_mapping}
    )
    try:
        for variable, memory, _ in before:
            if isinstance(memory, DividedMemory):
                variable._value, variable._shape = memory.pieces[shard], tuple(memory.pieces[shard].shape)
            elif others and id(variable) in others:
                variable._value, variable._shape = others[id(variable)], tuple(others[id(variable)].shape)
        if scope is not None:
            scope.state_mapping.update({key: (others or {})[key] for key in scoped})
        yield
    finally:
        for variable, memory, shape in before:
            variable._value, variable._shape = memory, shape
        if scope is not None:
            scope.state_mapping.update(scoped)


def memories_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the `tf.Variable` of each piece of a Keras variable; one for a variable that is not divided."""
    memory = variable._value
    return memory.pieces if isinstance(memory, DividedMemory) else (memory,)
