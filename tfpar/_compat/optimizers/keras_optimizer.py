"""Optimizers: one device's update on every replica, slots, and slots on other devices.

All of it is private. Written for Keras 3.15 and TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfpar._compat import versions
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.optimizers.keras_optimizer_copy import optimizer_of_weight, unbuilt_copy
from tfpar._compat.variables import keras_variables, keras_weight_keys
from tfpar._compat.variables.keras_weight_placement import place
from tfpar._compat.variables.tf_memory_elsewhere import is_elsewhere
from tfpar._compat.variables.tf_shared_scalars import SharedScalars


@contextlib.contextmanager
def one_device_optimizer() -> Iterator[None]:
    """Run the one-device code of Keras optimizers inside this context.

    Keras 3.15's TensorFlow optimizer reduces and updates across replicas itself, after clipping and inside
    conditionals (`merge_call called while defining a new graph`). tfpar reduces the gradients before and calls
    `apply` once on each replica, where the base class's code, which knows nothing of replicas, is right. It reads the
    learning rate once per weight, and sends each value to the weight's process. Here the weights of a device share one
    read until an update changes the rate, and the other scalars of the update.

    As in Keras' code for TensorFlow, `update_step` and `_use_weight_decay` take the `tf.Variable` of a weight, whose
    name is the whole path, `sequential/dense/bias:0`.
    """

    def update_all(optimizer: BaseOptimizer, gradients: Any, variables: Any, learning_rate: Any) -> None:
        scalars = SharedScalars()
        for gradient, variable in zip(gradients, map(_memory, variables), strict=True):
            with scalars.shared(variable.device):
                optimizer.update_step(gradient, variable, learning_rate)

    def decay_all(optimizer: BaseOptimizer, variables: Sequence[Any]) -> None:
        if optimizer.weight_decay is None:
            return
        scalars = SharedScalars()
        for variable in variables:
            memory = _memory(variable)
            if keras_weight_keys.is_excluded(optimizer, variable) or not optimizer._use_weight_decay(memory):
                continue
            with scalars.shared(memory.device):
                rate, decay = (tf.cast(one, memory.dtype) for one in (optimizer.learning_rate, optimizer.weight_decay))
                memory.assign_sub(memory * decay * rate)

    names = (
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    )
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(TFOptimizer, name, getattr(BaseOptimizer, name)))
        stack.enter_context(mock.patch.object(TFOptimizer, "_backend_update_step", update_all))
        stack.enter_context(mock.patch.object(TFOptimizer, "_apply_weight_decay", decay_all))
        stack.enter_context(mock.patch.object(LossScaleOptimizer, "_tf_apply", LossScaleOptimizer._common_apply))
        yield


def apply(optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
    """Update weights as the training step of Keras 3.15 does, which calls `apply_gradients`.

    A class may override that method, such as to centralize gradients.

    Args:
        optimizer: An optimizer.
        gradients: The gradient of each weight, None for none.
        weights: The weights, at least one.
    """
    # In an own step the method has run already, on the gradients of the replica.
    if keras_own_updates.applies() or type(optimizer).apply_gradients is BaseOptimizer.apply_gradients:
        optimizer.apply(list(gradients), list(weights))
    else:
        optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))


def _memory(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def move_optimizer(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Move the slots of a built optimizer to the devices of its moved weights.

    Args:
        optimizer: A built optimizer.
        variables: The weights that it was built for, in their order.
    """
    keras_variables.find_slots(keras_variables.innermost(optimizer))
    for slot, variable in slots_of(optimizer, variables):
        if not is_elsewhere(slot):
            place(slot, variable.value.device)


def slots_of(optimizer: keras.Optimizer, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the slots of a built optimizer that have the shape of their weight, with that weight.

    Keras 3.15 begins the name of a slot with the path of its weight (`add_variable_from_reference`).

    Args:
        optimizer: A built optimizer.
        variables: The weights that it was built for.
    """
    found = []
    for slot in keras_variables.innermost(optimizer).variables:
        of = [variable for variable in variables if slot.name.startswith(variable.path.replace("/", "_") + "_")]
        weight = max(of, key=lambda variable: len(variable.path), default=None)  # kernel_2, where there is a kernel too
        if weight is not None and slot.shape == weight.shape:
            found.append((slot, weight))
    return found


def slots_per_weight(optimizer: keras.Optimizer | None, weights: Sequence[keras.Variable]) -> int:
    """Return the largest number of an optimizer's variables of the size of a weight, for one weight (Keras 3.15).

    Args:
        optimizer: An optimizer, built or not; None for no slots.
        weights: The trained weights of the model, which several optimizers may update.
    """
    if optimizer is None:
        return 0
    innermost = keras_variables.innermost(optimizer)
    found = {id(one): one for one in (optimizer_of_weight(innermost, weight) for weight in weights)}
    return max(map(_num_slots, found.values()), default=0)


def _num_slots(optimizer: keras.Optimizer) -> int:
    probe = unbuilt_copy(optimizer)
    probe.build([keras.Variable(tf.zeros([1]))])
    return sum(variable.shape == (1,) for variable in probe.variables)


def begins_with_weights(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer creates slots with the values of their weights (Keras 3.15's ScheduleFreeAdamW)."""
    probe, mark = unbuilt_copy(keras_variables.innermost(optimizer)), 0.375
    probe.build([keras.Variable(tf.constant([mark]))])
    return any(slot.shape == (1,) and slot.numpy()[0] == mark for slot in probe.variables)


def num_applied(optimizer: keras.Optimizer | None) -> int:
    """Return how often an optimizer was applied to gradients, including those that it only accumulated.

    Keras 3.15's `iterations` is that number, or with gradient accumulation the number of updates.
    """
    if optimizer is None:
        return 0
    iterations = getattr(keras_variables.innermost(optimizer), "_iterations", None)
    return 0 if iterations is None else int(iterations.numpy())


def count_application(optimizer: keras.Optimizer) -> None:
    """Count an application to gradients that takes place elsewhere, or not at all.

    With gradient accumulation Keras 3.15's `iterations` is computed, and no variable.

    Args:
        optimizer: A built optimizer.
    """
    versions.private(keras_variables.innermost(optimizer), "_iterations").assign_add(1)


def updates_of(optimizer: keras.Optimizer | None, num_applied: int) -> int:
    """Return the value of `iterations` after an optimizer was applied a number of times (Keras 3.15)."""
    inner = None if optimizer is None else keras_variables.innermost(optimizer)
    return num_applied // (getattr(inner, "gradient_accumulation_steps", None) or 1)
