"""Optimizer slots that exist only on the owner of their weight.

    weight   DistributedVariable ─┬ tf.Variable on replica 0        slot   tf.Variable on replica 1, its owner;
                                  └ tf.Variable on replica 1               RemoteMemory in other processes

Written for Keras 3.15 and TensorFlow 2.21. A replicated `keras.Variable` stores a `DistributedVariable` in `_value`
(tensorflow/python/distribute/values.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute.numpy_dataset import SingleDevice
from tensorflow.python.distribute.values import DistributedVariable

from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar._compat.variables.sharded_memory import RemoteMemory, ShardedMemory, is_remote

_OWNED = "_tfpar_owned"  # marks the memory of a slot on one device
_UNIFORM = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_HOLDER = "_tfpar_holder"  # the rank of the process that holds a slot, an attribute of the slot in every process


def holder_of(variable: Any) -> int | None:
    """Return the rank of the only process that holds a slot, or None if every process has the variable."""
    rank: int | None = getattr(variable, _HOLDER, None)
    return rank


def is_owned(variable: keras.Variable) -> bool:
    """Return whether a variable is a slot that only one replica or process holds."""
    return getattr(variable._value, _OWNED, False) or holder_of(variable) is not None


def hold(slot: Any, holder: int, *, is_held_here: bool) -> None:
    """Record which process holds a slot, and release its memory in the others.

    Args:
        slot: An optimizer slot.
        holder: The rank of the process that holds it.
        is_held_here: Whether this is that process.
    """
    setattr(slot, _HOLDER, holder)
    if not is_held_here:
        if not is_remote(slot):
            slot._value = RemoteMemory(slot)
        slot._value.holder = holder


@contextlib.contextmanager
def creating_slots(is_held_here: Callable[[Any], bool]) -> Iterator[None]:
    """Shard new slots like their weights inside this context, and allocate none for weights of other processes.

    Args:
        is_held_here: Returns whether this process holds the slots of a weight.
    """
    original, initialize = TFOptimizer.add_variable_from_reference, Variable._initialize_with_initializer

    def add(optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        memory: Any = getattr(reference_variable, "_value", None)

        def in_shards(slot: Any, values: Any) -> None:
            if isinstance(values, _UNIFORM):
                sharded_memory.initialize_sharded(slot, values, memory)
            else:
                with tf.device("CPU:0"):
                    initialize(slot, values)
                sharded_memory.place_shards(slot, memory.axis, memory.sizes, memory.devices)

        is_here = is_held_here(reference_variable)
        if is_here and not isinstance(memory, ShardedMemory):
            return original(optimizer, reference_variable, *args, **kwargs)
        with mock.patch.object(Variable, "_initialize_with_initializer", in_shards if is_here else without_memory):
            return BaseOptimizer.add_variable_from_reference(optimizer, reference_variable, *args, **kwargs)

    def without_memory(slot: Any, initializer: Any) -> None:
        slot._value = RemoteMemory(slot)

    with mock.patch.object(TFOptimizer, "add_variable_from_reference", add):
        yield


@contextlib.contextmanager
def slots_on(device_of: Callable[[Any], str]) -> Iterator[None]:
    """Create each optimizer variable on a single device inside this context, in the scope of a strategy.

    Keras colocates a slot with all replicas of its weight (`add_variable_from_reference` in
    keras/src/backend/tensorflow/optimizer.py). `MirroredStrategy` creates a variable on a single device if it receives
    a `SingleDevice` instead (tensorflow/python/distribute/mirrored_strategy.py).

    Args:
        device_of: Returns the device for a slot from the `_value` of its weight, or from None for other variables.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        memory = next_creator(**{**kwargs, "colocate_with": SingleDevice(device_of(kwargs.get("colocate_with")))})
        setattr(memory, _OWNED, True)
        return memory

    with tf.variable_creator_scope(create):
        yield


def place_slot(slot: keras.Variable, value: Any, device: str) -> None:
    """Move an optimizer variable to a single device, in the scope of its strategy.

    Args:
        slot: An optimizer variable, replicated or not.
        value: Its new value.
        device: Such as `"/device:GPU:1"`.
    """
    with tf.init_scope(), slots_on(lambda _: device):
        keras_variables.re_create(slot, value)


def memories(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Return the `tf.Variable` of each local replica, a single one for a variable that is not replicated."""
    memory = variable._value
    return memory.values if isinstance(memory, DistributedVariable) else (memory,)


def copies(weight: keras.Variable) -> list[Sequence[tf.Variable]]:
    """Return the local copies of a weight, or of each of its shards."""
    if sharded_memory.is_sharded(weight):
        return [(shard,) for shard in sharded_memory.memories_of(weight)]
    return [memories(weight)]


@contextlib.contextmanager
def of_owners(weights: Sequence[keras.Variable], owners: Mapping[int, int]) -> Iterator[None]:
    """Replace replicated weights by the copies on their owners inside this context.

    The copies take the name of the weight, which optimizers read; TensorFlow appends the index of the replica.

    Args:
        weights: Weights, replicated or not.
        owners: The index of the local owner of each weight of this process, by the weight's `id`.
    """
    mirrored = [
        (weight, weight._value.values[owners[id(weight)]])
        for weight in weights
        if id(weight) in owners and isinstance(weight._value, DistributedVariable)
    ]
    names = [(memory, memory.name, weight._value.name) for weight, memory in mirrored]
    try:
        for memory, _, name in names:
            memory._handle_name = name
        with sharded_memory.replaced(mirrored):
            yield
    finally:
        for memory, name, _ in names:
            memory._handle_name = name
