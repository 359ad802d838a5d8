"""Updates of weights in pieces, each on its device, by Keras' own optimizers.

Written for Keras 3.15. An optimizer has a list of slots for each kind, in the order of its weights
(keras/src/optimizers/base_optimizer.py). For an update, the lists of weights and slots are replaced by lists of their
pieces, so that each piece is updated as a weight of its own.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfpar._compat.optimizers.keras_optimizer import slots_of
from tfpar._compat.variables import keras_variables, keras_weight_placement, sharded_memory
from tfpar._compat.variables.sharded_memory import DividedMemory
from tfpar._compat.variables.tf_memory_elsewhere import is_elsewhere

_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
)
_UNIFORM = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_NOT_SLOTS = ("_variables", "_trainable_variables")


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer updates each element of a weight from its own gradient and slots alone."""
    return type(keras_variables.innermost(optimizer)) in _ELEMENTWISE


@contextlib.contextmanager
def creating_divided_slots() -> Iterator[None]:
    """Create the slots of divided weights in pieces inside this context."""
    add, initialize = TFOptimizer.add_variable_from_reference, Variable._initialize_with_initializer

    def add_slot(optimizer: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        memory = getattr(reference_variable, "_value", None)
        if not isinstance(memory, DividedMemory):
            return add(optimizer, reference_variable, name=name, initializer=initializer)

        def in_pieces(variable: Any, values: Any) -> None:
            if isinstance(values, _UNIFORM):
                sharded_memory.initialize_divided(variable, values, memory)
            else:
                with tf.device("CPU:0"):
                    initialize(variable, values)
                sharded_memory.divide(variable, memory.axis, memory.sizes, memory.devices)

        with mock.patch.object(Variable, "_initialize_with_initializer", in_pieces):
            return BaseOptimizer.add_variable_from_reference(optimizer, reference_variable, name, initializer)

    with mock.patch.object(TFOptimizer, "add_variable_from_reference", add_slot):
        yield


def divide_slots(optimizer: Any, weights: Sequence[Any]) -> None:
    """Divide the slots of a built optimizer as their weights, and place those of other weights with them.

    Args:
        optimizer: A built optimizer.
        weights: The weights that it was built for.
    """
    keras_variables.find_slots(keras_variables.innermost(optimizer))
    for slot, weight in slots_of(optimizer, weights):
        memory = weight._value
        if is_elsewhere(slot):
            continue
        if not isinstance(memory, DividedMemory):
            keras_weight_placement.place(slot, memory.device)
        elif not sharded_memory.is_divided_as(slot, memory.axis, memory.sizes, memory.devices):
            sharded_memory.divide(slot, memory.axis, memory.sizes, memory.devices)


@contextlib.contextmanager
def of_pieces(optimizer: Any, owners: Sequence[int]) -> Iterator[None]:
    """Let an optimizer know the pieces of divided weights and slots as weights and slots inside this context.

    Args:
        optimizer: A built optimizer.
        owners: The number of the weight of each piece that has a gradient, in the order of the update.
    """
    inner = keras_variables.innermost(optimizer)
    attributes, weights = vars(inner), inner._trainable_variables
    pieces = [sharded_memory.pieces_of(weight) for weight in weights]
    replaced: dict[str, Any] = {"_trainable_variables": [one for of_one in pieces for one in of_one]}
    for name, value in attributes.items():
        if name not in _NOT_SLOTS and _are_slots(value, weights):
            replaced[name] = [
                part for slot, of_one in zip(value, pieces, strict=True) for part in _pieces_of_slot(slot, len(of_one))
            ]
    replaced["_trainable_variables_indices"] = {
        inner._var_key(piece): index for index, piece in enumerate(replaced["_trainable_variables"])
    }
    excluded = set(attributes.get("_exclude_from_weight_decay", ()))
    for weight, of_one in zip(weights, pieces, strict=True):
        if inner._var_key(weight) in excluded:
            excluded.update(inner._var_key(piece) for piece in of_one)
    if excluded:
        replaced["_exclude_from_weight_decay"] = excluded
    if inner.clipnorm:
        replaced["_clip_gradients"] = _clip_by_norm_of_weights(inner, owners)
    before = {name: attributes[name] for name in replaced if name in attributes}
    attributes.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            attributes.pop(name, None)
        attributes.update(before)


def _pieces_of_slot(slot: Any, number: int) -> list[Any]:
    """Return the pieces of a slot; without memory here, or without a slot, the same for each piece of its weight."""
    if slot is None or is_elsewhere(slot):
        return [slot] * number
    return sharded_memory.pieces_of(slot)


def _are_slots(value: Any, weights: Sequence[Any]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(weights)
        and any(isinstance(slot, keras.Variable) for slot in value)
        and all(
            slot is None or (isinstance(slot, keras.Variable) and slot.shape == weight.shape)
            for slot, weight in zip(value, weights, strict=True)
        )
    )


def _clip_by_norm_of_weights(optimizer: Any, owners: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return Keras' clipping by the norm of each weight, for the gradients of pieces.

    It computes what `tf.clip_by_norm` of TensorFlow 2.21 does, with the sum of squares over all pieces of a weight.
    """

    def clip(gradients: Sequence[Any]) -> list[Any]:
        squares: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        for owner, gradient in zip(owners, gradients, strict=True):
            squares[owner].append(tf.reduce_sum(tf.square(_values(gradient))))
        return [
            optimizer._clip_by_norm(gradient)
            if len(squares[owner]) == 1
            else _scaled(gradient, tf.add_n(squares[owner]), optimizer.clipnorm)
            for owner, gradient in zip(owners, gradients, strict=True)
        ]

    return clip


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient: Any, square: tf.Tensor, limit: float) -> Any:
    values = _values(gradient)
    positive = square > 0
    norm = tf.where(positive, tf.sqrt(tf.where(positive, square, tf.ones_like(square))), square)
    clipped = values * limit / tf.maximum(norm, tf.constant(limit, norm.dtype))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(clipped, gradient.indices, gradient.dense_shape)
    return clipped
