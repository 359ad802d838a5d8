"""Updates of weights by their owners: each process updates its own, with what depends on the gradients of all.

Written for Keras 3.15.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.callbacks import SwapEMAWeights
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers import base_optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfpar._compat import versions
from tfpar._compat.optimizers.keras_sharded_slots import is_owned, slots_of_weights
from tfpar._compat.variables import keras_variables
from tfpar._compat.variables.tf_memory_elsewhere import is_elsewhere
from tfpar.per_model import PerModel

AllReduce = Callable[[tf.Tensor], tf.Tensor]
# Takes a model, an optimizer and a function: calls it where the optimizer has the weights and slots of this process
# alone, and sends the new weights to all copies.
Change = Callable[[keras.Model, Any, Callable[[], None]], None]

_SHARDED = "_tfpar_sharded"  # an attribute of methods that were replaced
_CHANGES: PerModel[Change] = PerModel()


def check(optimizer: Any) -> None:
    """Refuse an optimizer that cannot update some of its weights alone.

    Args:
        optimizer: An optimizer, built or not.

    Raises:
        ValueError: If it has methods that take all weights at once, or state that is of no single weight.
    """
    inner, name = keras_variables.innermost(optimizer), type(optimizer).__name__
    own = list(itertools.takewhile(lambda base: not base.__module__.startswith("keras."), type(inner).__mro__))
    of_all = ("apply_gradients", "apply", "_backend_apply_gradients", "_backend_update_step", "_clip_gradients")
    method = next((method for method in of_all for base in own if method in vars(base)), None)
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
def of_all_gradients(all_reduce: AllReduce, dtype: str) -> Iterator[None]:
    """Use the global norm and the finite check of the gradients of all processes inside this context.

    All processes update their own weights in it, one without such weights too.

    Args:
        all_reduce: Sums a small tensor over all processes.
        dtype: The type of the norm, equal in all processes.
    """

    def global_norm(values: Sequence[Any]) -> tf.Tensor:
        squares = [keras.ops.sum(keras.ops.square(value)) for value in values if value is not None]
        total = keras.ops.sum(keras.ops.stack(squares)) if squares else 0.0
        return tf.sqrt(all_reduce(tf.cast(total, dtype)))

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
    ):
        yield


@contextlib.contextmanager
def only_own(optimizer: Any) -> Iterator[None]:
    """Let an optimizer know no accumulated gradients and moving averages of other processes inside this context.

    Keras has None there for a weight without one.

    Args:
        optimizer: A built optimizer.
    """
    attributes = vars(keras_variables.innermost(optimizer))
    names = attributes.keys() & {"_accumulated_gradients", "_model_variables_moving_average"}
    before = {name: attributes[name] for name in names}
    for name, slots in before.items():
        attributes[name] = [None if slot is None or is_elsewhere(slot) else slot for slot in slots]
    try:
        yield
    finally:
        attributes.update(before)


def finalizes(optimizer: Any) -> bool:
    """Return whether an optimizer changes weights after training, to their moving averages by default."""
    inner = keras_variables.innermost(optimizer)
    return bool(inner.use_ema) or type(inner).finalize_variable_values is not BaseOptimizer.finalize_variable_values


def swap_on_owners(model: keras.Model, change: Change) -> None:
    """Let `keras.callbacks.SwapEMAWeights` swap the sharded averages of a model on the owners of the weights.

    Keras 3.15 swaps a weight and its average on every replica (keras/src/callbacks/swap_ema_weights.py).

    Args:
        model: A model with sharded optimizer state.
        change: Changes its weights and averages.
    """
    _CHANGES[model] = change
    if getattr(SwapEMAWeights._tf_swap_variables, _SHARDED, False):
        return

    def swap(weight: Any, average: Any) -> None:
        before = tf.identity(weight.value)
        weight.assign(average)
        average.assign(before)

    SwapEMAWeights._tf_swap_variables = _on_owners(SwapEMAWeights._tf_swap_variables, swap)
    SwapEMAWeights._tf_finalize_ema_values = _on_owners(
        SwapEMAWeights._tf_finalize_ema_values, lambda weight, average: average.assign(weight)
    )


def _on_owners(original: Callable[..., None], change: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def method(callback: SwapEMAWeights, optimizer: Any) -> None:
        def change_own() -> None:
            for weight, average in zip(
                optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
            ):
                if average is not None:
                    change(weight, average)

        if any(is_owned(average) for average in optimizer._model_variables_moving_average if average is not None):
            _CHANGES[callback.model](callback.model, optimizer, change_own)
        else:
            original(callback, optimizer)

    setattr(method, _SHARDED, True)
    return method


def refuse_updates_by_replicas() -> None:
    """Refuse Keras' own training with slots on the device of one replica.

    Keras 3.15 runs the update on every replica (`_distributed_tf_update_step` in
    keras/src/backend/tensorflow/optimizer.py), each time with the one slot.
    """
    update = TFOptimizer._distributed_tf_update_step
    if getattr(update, _SHARDED, False):
        return

    def update_mirrored(optimizer: Any, distribution: Any, *args: Any, **kwargs: Any) -> Any:
        if distribution.num_replicas_in_sync > 1 and any(map(is_owned, optimizer.variables)):
            raise ValueError(
                "The optimizer's state is sharded, and Keras' own fit would change each part once for each replica. "
                "Train with tfpar.fit or tfpar.Trainer."
            )
        return update(optimizer, distribution, *args, **kwargs)

    setattr(update_mirrored, _SHARDED, True)
    TFOptimizer._distributed_tf_update_step = update_mirrored
