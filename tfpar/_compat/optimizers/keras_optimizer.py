"""Updates and slots of Keras optimizers. Private API of Keras 3.15 and TensorFlow 2.21."""

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
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfpar._compat import versions
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.optimizers.keras_optimizer_copy import optimizer_of_weight, unbuilt_copy
from tfpar._compat.variables import keras_variables, keras_weight_keys
from tfpar._compat.variables.keras_weight_placement import place_as
from tfpar._compat.variables.sharded_memory import is_remote
from tfpar._compat.variables.tf_shared_scalars import SharedScalars


@contextlib.contextmanager
def one_device_optimizer() -> Iterator[None]:
    """Run the one-device code of Keras optimizers inside this context.

    Keras 3.15's optimizer for TensorFlow reduces gradients across replicas itself, after clipping and inside
    conditionals (`merge_call called while defining a new graph`). tfpar reduces the gradients first and then calls
    `apply` once per replica, so it needs the code of the base class, which ignores replicas. That code reads the
    learning rate once per weight, and sends it to the weight's process. Here the weights of a device share the learning
    rate, until an update changes it, and the other scalars of the update.

    As in Keras' own code, `update_step` and `_use_weight_decay` receive the `tf.Variable` of a weight, whose name is
    the whole path, such as `sequential/dense/bias:0`.
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
                rate = tf.cast(optimizer.learning_rate, memory.dtype)
                decay = tf.cast(optimizer.weight_decay, memory.dtype)
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
    """Update weights like the training step of Keras 3.15, which calls `apply_gradients`.

    A custom optimizer may override that method, for example to centralize gradients.

    Args:
        optimizer: An optimizer.
        gradients: The gradient of each weight, or None.
        weights: The weights, at least one.
    """
    # In an own step the method has run already, on the gradients of the replica.
    if keras_own_updates.applies() or type(optimizer).apply_gradients is BaseOptimizer.apply_gradients:
        optimizer.apply(list(gradients), list(weights))
    else:
        optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))


def _memory(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def move_slots(optimizer: keras.Optimizer) -> None:
    """Move the slots of a built optimizer to the devices of their weights, sharded like them.

    Args:
        optimizer: A built optimizer.
    """
    keras_variables.find_slots(keras_variables.innermost(optimizer))
    for slot, weight in slots_of_weights(optimizer):
        if not is_remote(slot):
            place_as(slot, weight)


def slots_of_weights(optimizer: keras.Optimizer) -> list[tuple[Any, Any]]:
    """Return the slots of a built optimizer of Keras 3.15 that belong to a single weight, each with the weight.

    A slot has the shape of its weight and a name that starts with the weight's path (`add_variable_from_reference`), or
    it is in a list with one item per weight, like Adafactor's row and column factors.

    Args:
        optimizer: A built optimizer.
    """
    inner, weights = keras_variables.innermost(optimizer), weights_of(optimizer)
    prefixes, pairs = [(weight, weight.path.replace("/", "_") + "_") for weight in weights], dict[int, Any]()
    for slot in inner.variables:
        named = [weight for weight, prefix in prefixes if slot.name.startswith(prefix)]
        weight = max(named, key=lambda weight: len(weight.path), default=None)  # kernel_2 rather than kernel
        if weight is not None and slot.shape == weight.shape:
            pairs[id(slot)] = weight
    for name, values in vars(inner).items():
        if name != "_variables" and isinstance(values, list | tuple) and len(values) == len(weights):
            pairs |= {id(slot): weight for slot, weight in zip(values, weights, strict=True)}
    return [(slot, pairs[id(slot)]) for slot in inner.variables if id(slot) in pairs]


def weights_of(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer was built for."""
    return list(versions.private(keras_variables.innermost(optimizer), "_trainable_variables"))


def slots_per_weight(optimizer: keras.Optimizer | None, weights: Sequence[keras.Variable]) -> int:
    """Return how many slots of the size of a weight an optimizer of Keras 3.15 creates per weight, at most.

    Args:
        optimizer: An optimizer, built or not, or None.
        weights: The trained weights of the model. Several optimizers may update them.
    """
    if optimizer is None:
        return 0
    innermost = keras_variables.innermost(optimizer)
    optimizers = {id(inner): inner for inner in (optimizer_of_weight(innermost, weight) for weight in weights)}
    return max(map(_num_slots, optimizers.values()), default=0)


def _num_slots(optimizer: keras.Optimizer) -> int:
    probe = unbuilt_copy(optimizer)
    probe.build([keras.Variable(tf.zeros([1]))])
    return sum(variable.shape == (1,) for variable in probe.variables)


def begins_with_weights(optimizer: keras.Optimizer) -> bool:
    """Return whether slots start as copies of their weights, as in Keras 3.15's ScheduleFreeAdamW."""
    probe, mark = unbuilt_copy(keras_variables.innermost(optimizer)), 0.375
    probe.build([keras.Variable(tf.constant([mark]))])
    return any(slot.shape == (1,) and slot.numpy()[0] == mark for slot in probe.variables)


def num_applied(optimizer: keras.Optimizer | None) -> int:
    """Return how often an optimizer was applied, including gradients that it only accumulated.

    Keras 3.15's `iterations` counts updates instead if the optimizer accumulates gradients.
    """
    if optimizer is None:
        return 0
    iterations = getattr(keras_variables.innermost(optimizer), "_iterations", None)
    return 0 if iterations is None else int(iterations.numpy())


def count_application(optimizer: keras.Optimizer) -> None:
    """Count a step in which the optimizer is not applied itself.

    `iterations` cannot be assigned: with gradient accumulation Keras 3.15 computes it.

    Args:
        optimizer: A built optimizer.
    """
    versions.private(keras_variables.innermost(optimizer), "_iterations").assign_add(1)


def updates_of(optimizer: keras.Optimizer | None, num_applied: int) -> int:
    """Return the value of `iterations` after an optimizer was applied a number of times (Keras 3.15)."""
    inner = None if optimizer is None else keras_variables.innermost(optimizer)
    return num_applied // (getattr(inner, "gradient_accumulation_steps", None) or 1)


def resource_handles(optimizer: Any, weight: Any, kinds: Sequence[str]) -> list[tf.Tensor] | None:
    """Return the handles of a weight and its slots, or None if they differ in device, dtype or shape.

    Args:
        optimizer: A built optimizer.
        weight: The `tf.Variable` of one of its weights; of a replicated weight that of the calling replica.
        kinds: Keras' names for the lists of slots, without a leading underscore.
    """
    index = optimizer._get_variable_index(weight)
    slots = [_slots_of_kind(optimizer, kind) for kind in kinds]
    if not all(isinstance(of_kind, list | tuple) and index < len(of_kind) for of_kind in slots):
        return None
    memories = [weight, *(_memory(of_kind[index]) for of_kind in slots)]
    if not all(map(_has_handle, memories)):
        return None
    if any(_device_dtype_shape(memory) != _device_dtype_shape(weight) for memory in memories):
        return None
    return [memory.handle for memory in memories]


def _slots_of_kind(optimizer: Any, kind: str) -> Any:
    """Return a list of slots: SGD calls one `momentums`, Adam `_momentums`."""
    public = getattr(optimizer, kind, None)
    return getattr(optimizer, f"_{kind}", ()) if public is None else public


def _has_handle(memory: Any) -> bool:
    """Return whether memory is a single resource here: not sharded, remote, or replicated outside a replica context."""
    if isinstance(memory, DistributedVariable):
        return get_current_replica_id_as_int() is not None
    return isinstance(memory, ResourceVariable)


def _device_dtype_shape(memory: Any) -> tuple[Any, ...]:
    return memory.device, memory.dtype, memory.shape
