"""Optimizer state that is divided over processes: each holds the slots of some weights, and updates these.

Written for Keras 3.15 and TensorFlow 2.21. A slot of another process is a Keras variable without memory: Keras reads
such a variable through its initializer (keras/src/backend/common/variables.py), which here raises, or returns an array
that is lent for a while.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers import base_optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfpar._compat import keras_optimizer, keras_variables, tf_divided_memory, versions

_HOLDER = "_tfpar_holder"  # an attribute of a divided slot, also where it has memory: the rank of its holder
_CHECKED = "_tfpar_checked"

AllReduce = Callable[[tf.Tensor], tf.Tensor]


class _OfAnotherProcess:
    """The value of a slot without memory.

    Args:
        path: The name of the slot.
        rank: The process that holds it.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self.lent: np.ndarray | None = None

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        if self.lent is None:
            raise self.refusal("read")
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(self.lent)

    def refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"Worker {self._rank} alone holds {self._path!r}, as the optimizer's state is sharded, and this worker "
            f"cannot {what} it. Save with trainer.save on all workers, with tfpar.Checkpoints, or with ModelCheckpoint "
            "at the end of epochs; resume with tfpar.Checkpoints."
        )


def is_divided(variable: Any) -> bool:
    """Return whether one process alone holds a variable, this one or another."""
    return getattr(variable, _HOLDER, None) is not None


def holder_of(slot: Any) -> int:
    """Return the rank of the process that holds a divided slot."""
    return int(getattr(slot, _HOLDER))


def is_elsewhere(variable: Any) -> bool:
    """Return whether another process holds a variable."""
    return is_divided(variable) and not keras_variables.is_allocated(variable)


def divide(slot: Any, holder: int, is_held_here: bool) -> None:
    """Note the process that holds a slot; without it, release the memory here.

    Args:
        slot: A slot of an optimizer.
        holder: The rank of the process.
        is_held_here: Whether that is this process.
    """
    setattr(slot, _HOLDER, holder)
    if not is_held_here:
        slot._value = None
        versions.replace(slot, "_initializer", _OfAnotherProcess(slot.path, holder))


@contextlib.contextmanager
def lent(arrays: Sequence[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Read slots of other processes as arrays inside this context.

    Args:
        arrays: The slots, each with its value.
    """
    found = [(slot._initializer, array) for slot, array in arrays]
    try:
        for value, array in found:
            value.lent = array
        yield
    finally:
        for value, _ in found:
            value.lent = None


def lent_array(variable: Any) -> np.ndarray | None:
    """Return the array that is lent to a slot of another process, without a copy; None for other variables."""
    return variable._initializer.lent if is_elsewhere(variable) else None


@contextlib.contextmanager
def creating_slots(is_held_here: Callable[[Any], bool]) -> Iterator[list[Any]]:
    """Create the slots of weights of other processes without memory inside this context.

    Args:
        is_held_here: Takes a weight, and returns whether this process holds its slots.

    Returns:
        The slots that were assigned after their creation, such as those of ScheduleFreeAdamW, which begin with the
        weights.
    """
    elsewhere = False
    assigned: list[Any] = []

    def add(optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal elsewhere
        elsewhere = not is_held_here(reference_variable)
        try:
            return original_add(optimizer, reference_variable, *args, **kwargs)
        finally:
            elsewhere = False

    def initialize(variable: Any, initializer: Any) -> None:
        if elsewhere:
            variable._value = None
            versions.replace(variable, "_initializer", initializer)
        else:
            original_initialize(variable, initializer)

    def assign(optimizer: Any, variable: Any, value: Any) -> None:
        assigned.append(variable)
        if keras_variables.is_allocated(variable):
            original_assign(optimizer, variable, value)

    def assign_value(variable: Any, value: Any) -> None:
        assigned.append(variable)
        if keras_variables.is_allocated(variable):
            original_assign_value(variable, value)

    original_add, original_assign = TFOptimizer.add_variable_from_reference, TFOptimizer.assign
    original_assign_value = Variable._direct_assign
    original_initialize = Variable._initialize_with_initializer
    with (
        mock.patch.object(TFOptimizer, "add_variable_from_reference", add),
        mock.patch.object(TFOptimizer, "assign", assign),
        mock.patch.object(Variable, "_direct_assign", assign_value),
        mock.patch.object(Variable, "_initialize_with_initializer", initialize),
    ):
        yield assigned


def slots_of_weights(optimizer: keras.Optimizer) -> list[tuple[Any, Any]]:
    """Return the variables of a built optimizer that belong to one weight, each with that weight.

    Optimizers keep them in lists with an item for each weight; Adafactor's row and column factors have no other sign.

    Args:
        optimizer: A built optimizer.
    """
    inner = keras_variables.innermost(optimizer)
    weights = list(versions.private(inner, "_trainable_variables"))
    found = {id(slot): (slot, weight) for slot, weight in keras_optimizer.slots_of(inner, weights)}
    known = set(map(id, inner.variables))
    for values in vars(inner).values():
        if isinstance(values, list | tuple) and len(values) == len(weights):
            found |= {
                id(slot): (slot, weight) for slot, weight in zip(values, weights, strict=True) if id(slot) in known
            }
    return [found[id(slot)] for slot in inner.variables if id(slot) in found]


def check(optimizer: Any) -> None:
    """Refuse an optimizer that cannot update some of its weights alone.

    Args:
        optimizer: An optimizer, built or not.

    Raises:
        ValueError: If it has methods that take all weights at once, or state that is of no single weight.
    """
    inner, name = keras_variables.innermost(optimizer), type(optimizer).__name__
    own = list(itertools.takewhile(lambda one: not one.__module__.startswith("keras."), type(inner).__mro__))
    of_all = ("apply_gradients", "apply", "_backend_apply_gradients", "_backend_update_step", "_clip_gradients")
    method = next((method for method in of_all for one in own if method in vars(one)), None)
    if type(inner).apply is not BaseOptimizer.apply and not isinstance(inner, LossScaleOptimizer):
        method = "apply"
    way_out = "Leave shard out, or use Mirrored in one process."
    if method is not None:
        raise ValueError(
            f"With shard='optimizer' each worker updates its weights alone, and {method} of {name} takes all weights "
            f"at once. Override update_step instead. {way_out}"
        )
    if own and inner.built:
        of_weights = {id(slot) for slot, _ in slots_of_weights(inner)}
        shared = {id(versions.private(inner, "_iterations")), id(getattr(inner, "_learning_rate", None)), *of_weights}
        others = [variable.path for variable in inner.variables if id(variable) not in shared]
        if others:
            raise ValueError(
                f"With shard='optimizer' each worker updates its weights alone, and {name} has state of all weights, "
                f"{others[0]!r}. {way_out}"
            )


@contextlib.contextmanager
def updating(optimizer: Any, own: Sequence[Any], everywhere: Sequence[Any], all_reduce: AllReduce) -> Iterator[None]:
    """Update some weights of an optimizer inside this context; other processes update the others.

    The global norm and the check of scaled losses are those of all gradients. Each process adds the squared norms of
    its weights at their places in a vector of zeros, so that the sum has the bits of one process.

    Args:
        optimizer: A built optimizer.
        own: The weights of this process, with and without a gradient, in the order of the optimizer.
        everywhere: The weights with a gradient in all processes together, in the order of the optimizer.
        all_reduce: Sums a small tensor over all processes; all of them call it.
    """
    normed = [weight for weight in everywhere if not getattr(weight, "overwrite_with_gradient", False)]
    of_own = set(map(_key, own))
    places = [place for place, weight in enumerate(normed) if _key(weight) in of_own]

    def global_norm(values: Sequence[Any]) -> tf.Tensor:
        squared = [keras.ops.sum(keras.ops.square(value)) for value in values if value is not None]
        rows = tf.constant(places, tf.int32, [len(places), 1])
        dtype = tf.as_dtype(normed[0].dtype)
        of_here = tf.stack(squared) if squared else tf.zeros([0], dtype)
        return tf.sqrt(tf.reduce_sum(all_reduce(tf.scatter_nd(rows, tf.cast(of_here, dtype), [len(normed)]))))

    def check_finite(outer: Any, gradients: Sequence[Any]) -> tf.Tensor:
        is_finite = original_check(outer, gradients) if gradients else tf.constant(True)
        return tf.equal(all_reduce(1 - tf.cast(is_finite, tf.int32)), 0)

    def apply(updated: Any, grads: Any, trainable_variables: Any = None) -> None:
        if len(grads):
            original_apply(updated, grads, trainable_variables)
            return
        updated._backend_apply_gradients([], [])  # counters that all processes have
        updated._iterations.assign_add(1)

    original_check, original_apply = LossScaleOptimizer.check_finite, BaseOptimizer.apply
    with (
        mock.patch.object(base_optimizer, "global_norm", global_norm),
        mock.patch.object(LossScaleOptimizer, "check_finite", check_finite),
        mock.patch.object(BaseOptimizer, "apply", apply),
        only_own(optimizer, own),
    ):
        yield


def _key(weight: Any) -> tuple[int, int]:
    """Return what tells a weight, or a piece of a divided weight, from others."""
    whole, shard = tf_divided_memory.whole_of(weight)
    return id(whole), shard


def weights_of(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer was built for."""
    return list(versions.private(keras_variables.innermost(optimizer), "_trainable_variables"))


def has_averages(optimizer: Any) -> bool:
    """Return whether an optimizer keeps moving averages of its weights."""
    return bool(keras_variables.innermost(optimizer).use_ema)


@contextlib.contextmanager
def only_own(optimizer: Any, weights_here: Sequence[Any]) -> Iterator[None]:
    """Let an optimizer know only the accumulated gradients and moving averages of some weights inside this context.

    Args:
        optimizer: A built optimizer.
        weights_here: These weights.
    """
    inner, own = keras_variables.innermost(optimizer), set(map(id, weights_here))
    attributes = vars(inner)
    weights = list(versions.private(inner, "_trainable_variables"))
    changed: dict[str, list[Any]] = {}
    if inner.use_ema:
        averages = versions.private(inner, "_model_variables_moving_average")
        pairs = [pair for pair in zip(weights, averages, strict=True) if id(pair[0]) in own]
        changed["_trainable_variables"] = [weight for weight, _ in pairs]
        changed["_model_variables_moving_average"] = [average for _, average in pairs]
    if inner.gradient_accumulation_steps:
        accumulators = versions.private(inner, "_accumulated_gradients")
        changed["_accumulated_gradients"] = [
            one if id(weight) in own else None for weight, one in zip(weights, accumulators, strict=True)
        ]
    before = {name: attributes[name] for name in changed}
    attributes.update(changed)
    try:
        yield
    finally:
        attributes.update(before)


def refuse_changes_of_others() -> None:
    """Refuse to assign a slot of another process, with a sentence in place of Keras' AttributeError."""
    original = Variable._direct_assign
    if getattr(original, _CHECKED, False):
        return

    def assign(variable: Any, value: Any) -> None:
        if is_elsewhere(variable):
            raise variable._initializer.refusal("change")
        original(variable, value)

    setattr(assign, _CHECKED, True)
    Variable._direct_assign = assign
