"""Sharded optimizer updates: each process updates its own shards.

Global norms and finite checks still cover the gradients of all processes. Written for Keras 3.15: an optimizer has one
list per kind of slot, in the order of its weights (keras/src/optimizers/base_optimizer.py).
"""

from __future__ import annotations

import collections
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
from tfpar._compat.optimizers.keras_optimizer import slots_of_weights
from tfpar._compat.optimizers.keras_sharded_slots import is_owned
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.per_model import PerModel

AllReduce = Callable[[tf.Tensor], tf.Tensor]
# (model, optimizer, function) -> calls the function on the weights and slots of this process, then sends the weights to
# their copies.
Change = Callable[[keras.Model, Any, Callable[[], None]], None]

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
_NOT_SLOTS = ("_variables", "_trainable_variables")
_SHARDED = "_tfpar_sharded"  # marks replaced methods
_CHANGES: PerModel[Change] = PerModel()


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer updates each element of a weight only from the gradient and slots of the element."""
    return type(keras_variables.innermost(optimizer)) in _ELEMENTWISE


def check(optimizer: Any) -> None:
    """Refuse an optimizer that cannot update a part of its weights.

    Args:
        optimizer: An optimizer, built or not.

    Raises:
        ValueError: If a custom optimizer overrides a method that takes all weights, or has state shared by weights.
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
    """Compute global norms and finite checks over the gradients of all processes inside this context.

    Every process must apply the optimizer in it, even one that owns no weights.

    Args:
        all_reduce: Sums a small tensor over all processes.
        dtype: The dtype of the norm, the same in all processes.
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
        updated._backend_apply_gradients([], [])  # updates counters
        updated._iterations.assign_add(1)

    original_check, original_apply = LossScaleOptimizer.check_finite, BaseOptimizer.apply
    with (
        mock.patch.object(base_optimizer, "global_norm", global_norm),
        mock.patch.object(LossScaleOptimizer, "check_finite", check_finite),
        mock.patch.object(BaseOptimizer, "apply", apply),
    ):
        yield


@contextlib.contextmanager
def own_shards(optimizer: Any, updated: Sequence[int]) -> Iterator[None]:
    """Let an optimizer treat each shard of a weight as a weight with its own slots inside this context.

    Slots of other processes become None, which Keras uses for weights without such a slot.

    Args:
        optimizer: A built optimizer.
        updated: For each weight or shard with a gradient, in the order of the update, the `id` of the whole weight.
    """
    inner = keras_variables.innermost(optimizer)
    attributes, of_shards = vars(inner), _of_shards(inner, updated)
    before = {name: attributes[name] for name in of_shards if name in attributes}
    attributes.update(of_shards)
    try:
        yield
    finally:
        for name in of_shards:
            del attributes[name]
        attributes.update(before)


def _of_shards(optimizer: Any, updated: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of an optimizer that refer to weights and slots, for their shards."""
    weights, key_of = optimizer._trainable_variables, optimizer._var_key
    shards = [sharded_memory.shards_of(weight) for weight in weights]
    of_all = list(itertools.chain.from_iterable(shards))
    replaced: dict[str, Any] = {
        "_trainable_variables": of_all,
        "_trainable_variables_indices": {key_of(shard): index for index, shard in enumerate(of_all)},
    }
    for name, value in vars(optimizer).items():
        if name not in _NOT_SLOTS and _are_slots(value, weights):
            pairs = zip(value, map(len, shards), strict=True)
            replaced[name] = [shard for slot, number in pairs for shard in _shards_of_slot(slot, number)]
    if excluded := set(vars(optimizer).get("_exclude_from_weight_decay", ())):
        of_excluded = itertools.compress(shards, [key_of(weight) in excluded for weight in weights])
        replaced["_exclude_from_weight_decay"] = excluded.union(map(key_of, itertools.chain.from_iterable(of_excluded)))
    if optimizer.clipnorm and len(of_all) > len(weights):
        replaced["_clip_gradients"] = _clip_by_norm_of_weights(optimizer, updated)
    return replaced


def _shards_of_slot(slot: Any, number: int) -> list[Any]:
    if slot is None or sharded_memory.is_remote(slot):
        return [None] * number
    return sharded_memory.shards_of(slot)


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


def _clip_by_norm_of_weights(optimizer: Any, updated: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return Keras' clipping by the norm of each weight, applied to gradients of shards.

    It computes the same as TensorFlow 2.21's `tf.clip_by_norm`, with the norm over all shards of a weight.
    """

    def clip(gradients: Sequence[Any]) -> list[Any]:
        squares: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        for weight, gradient in zip(updated, gradients, strict=True):
            squares[weight].append(tf.reduce_sum(tf.square(_values(gradient))))
        return [
            optimizer._clip_by_norm(gradient)
            if len(squares[weight]) == 1
            else _scaled(gradient, tf.add_n(squares[weight]), optimizer.clipnorm)
            for weight, gradient in zip(updated, gradients, strict=True)
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


def finalizes(optimizer: Any) -> bool:
    """Return whether an optimizer overwrites weights after training, for example by their moving averages."""
    inner = keras_variables.innermost(optimizer)
    return bool(inner.use_ema) or type(inner).finalize_variable_values is not BaseOptimizer.finalize_variable_values


def swap_on_owners(model: keras.Model, change: Change) -> None:
    """Make `keras.callbacks.SwapEMAWeights` swap sharded averages on the owners of the weights.

    Keras 3.15 swaps weights and averages on every replica (keras/src/callbacks/swap_ema_weights.py).

    Args:
        model: A model with sharded optimizer state.
        change: Runs a change of its weights and slots.
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

        averages = [average for average in optimizer._model_variables_moving_average if average is not None]
        if any(is_owned(average) or sharded_memory.is_sharded(average) for average in averages):
            _CHANGES[callback.model](callback.model, optimizer, change_own)
        else:
            original(callback, optimizer)

    setattr(method, _SHARDED, True)
    return method


def refuse_updates_by_replicas() -> None:
    """Refuse Keras' own training of replicated weights with slots on single devices.

    Every replica would update the same slot (`_distributed_tf_update_step` in
    keras/src/backend/tensorflow/optimizer.py).
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
