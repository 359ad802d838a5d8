"""Single replicas of mirrored variables, and optimizer slots on the device of one replica.

Written for Keras 3.15 and TensorFlow 2.21. A mirrored `keras.Variable` has a `DistributedVariable` in `_value`, which
holds a `tf.Variable` for each replica (tensorflow/python/distribute/values.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import SwapEMAWeights
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow.python.distribute.numpy_dataset import SingleDevice
from tensorflow.python.distribute.values import DistributedVariable

from tfpar._compat import keras_divided_state, keras_variables
from tfpar.per_model import PerModel

_OWNED = "_tfpar_owned"  # an attribute of the memory of slots on one device
_SENDERS: PerModel[Callable[[keras.Model], None]] = PerModel()


@contextlib.contextmanager
def slots_on(device_of: Callable[[Any], str]) -> Iterator[None]:
    """Create each variable of an optimizer on one device inside this context, within the scope of a strategy.

    Keras creates a slot on the replicas of its weight (`add_variable_from_reference` in
    keras/src/backend/tensorflow/optimizer.py). `MirroredStrategy` creates a variable on one device if the creator
    receives a `SingleDevice` (tensorflow/python/distribute/mirrored_strategy.py).

    Args:
        device_of: Takes the `_value` of the weight of a slot, None for another variable, and returns a device.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        memory = next_creator(**{**kwargs, "colocate_with": SingleDevice(device_of(kwargs.get("colocate_with")))})
        setattr(memory, _OWNED, True)
        return memory

    with tf.variable_creator_scope(create):
        yield


def place_slot(slot: keras.Variable, device: str) -> None:
    """Move a variable of an optimizer to one device, within the scope of its strategy.

    Its value is that of the first replica.

    Args:
        slot: A variable of an optimizer, mirrored or not.
        device: Such as `"/device:GPU:1"`.
    """
    if not is_owned(slot) or not keras_variables.is_on(slot, device):
        value = memories(slot)[0].read_value()
        with tf.init_scope(), slots_on(lambda _: device):
            keras_variables.re_create(slot, value)


def is_owned(variable: keras.Variable) -> bool:
    """Return whether a variable is a slot on the device of one replica."""
    return getattr(variable._value, _OWNED, False)


def memories(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Return the `tf.Variable` of each local replica; one for a variable that is not mirrored."""
    memory = variable._value
    return memory.values if isinstance(memory, DistributedVariable) else (memory,)


@contextlib.contextmanager
def of_owners(owners: Mapping[int, int], variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Read and update only the memory of one replica of each weight inside this context.

    It has the name of the mirrored weight, which optimizers read: TensorFlow adds the number of the replica.

    Args:
        owners: The number of the replica by the weight's `id`.
        variables: Mirrored weights.
    """
    mirrored = [(variable, variable._value) for variable in variables]
    owned = [memories(variable)[owners[id(variable)]] for variable in variables]
    names = [memory.name for memory in owned]
    try:
        for (variable, of_all), memory in zip(mirrored, owned, strict=True):
            variable._value, memory._handle_name = memory, of_all.name
        yield
    finally:
        for (variable, of_all), memory, name in zip(mirrored, owned, names, strict=True):
            variable._value, memory._handle_name = of_all, name


def swap_owned_averages() -> None:
    """Extend `keras.callbacks.SwapEMAWeights` to moving averages on the device of one replica.

    Keras 3.15 swaps a weight and its average on every replica, with three sums; an average that the replicas share
    would be swapped once for each of them (keras/src/callbacks/swap_ema_weights.py). Averages of other processes are
    swapped there.
    """
    swap, finalize = SwapEMAWeights._tf_swap_variables, SwapEMAWeights._tf_finalize_ema_values
    if getattr(swap, _OWNED, False):
        return

    def swap_pair(weight: keras.Variable, average: keras.Variable) -> None:
        total = memories(weight)[0] + average._value
        average._value.assign(total - average._value)
        for memory in memories(weight):
            memory.assign(total - average._value)

    def finalize_pair(weight: keras.Variable, average: keras.Variable) -> None:
        average._value.assign(memories(weight)[0].read_value())

    SwapEMAWeights._tf_swap_variables = _for_each_owned_pair(swap, swap_pair)
    SwapEMAWeights._tf_finalize_ema_values = _for_each_owned_pair(finalize, finalize_pair)


def send_swapped_weights(model: keras.Model, send: Callable[[keras.Model], None]) -> None:
    """Note how the swapped weights of a model get from their owners to the other processes.

    Args:
        model: A model with averages in several processes.
        send: Takes the model.
    """
    _SENDERS[model] = send


def _for_each_owned_pair(original: Callable[..., None], change: Callable[..., None]) -> Callable[..., None]:
    """Return a method of `SwapEMAWeights` that changes each weight and its average, or calls Keras' own method.

    The averages of other processes are changed there, by the same call, and the new weights are sent.
    """

    def method(callback: SwapEMAWeights, optimizer: Any) -> None:
        averages = optimizer._model_variables_moving_average
        if not any(is_owned(average) or keras_divided_state.is_divided(average) for average in averages):
            original(callback, optimizer)
            return
        for weight, average in zip(optimizer._trainable_variables, averages, strict=True):
            if not keras_divided_state.is_elsewhere(average):
                change(weight, average)
        if (send := _SENDERS.get(callback.model)) is not None:
            send(callback.model)

    setattr(method, _OWNED, True)
    return method


def refuse_updates_by_replicas() -> None:
    """Refuse Keras' own training with slots on the device of one replica.

    Keras 3.15 runs the update on every replica (`_distributed_tf_update_step` in
    keras/src/backend/tensorflow/optimizer.py), each time with the one slot.
    """
    update = TFOptimizer._distributed_tf_update_step
    if getattr(update, _OWNED, False):
        return

    def update_mirrored(optimizer: Any, distribution: Any, *args: Any, **kwargs: Any) -> Any:
        if distribution.num_replicas_in_sync > 1 and any(map(is_owned, optimizer.variables)):
            raise ValueError(
                "The optimizer's state is sharded, and Keras' own fit would change each part once for each replica. "
                "Train with tfpar.fit or tfpar.Trainer."
            )
        return update(optimizer, distribution, *args, **kwargs)

    setattr(update_mirrored, _OWNED, True)
    TFOptimizer._distributed_tf_update_step = update_mirrored
