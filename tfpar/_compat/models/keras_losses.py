"""Hooks into the losses of compiled models and their reduction over a batch (Keras 3.15, TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfpar._compat.models import keras_losses_in_call, keras_model

LossReduction = Callable[[Any, Any, Any, str | None, Any], tf.Tensor]
AddedLossReduction = Callable[[keras.Model, Any], tf.Tensor]
LossCall = Callable[[Callable[..., Any], Any, Any, Any], Any]


# Keras' own functions, for reductions that build on them.
reduce_weighted_values = keras_losses_in_call.reduce_of_these
apply_mask = loss_module.apply_mask
squeeze_or_expand_to_same_rank = loss_module.squeeze_or_expand_to_same_rank
aggregate_added_loss = TensorFlowTrainer.__mro__[1]._aggregate_additional_loss


# Keras' own functions, before any patch. The replicas of MirroredStrategy are threads that alternate when they
# communicate.
_call_loss, _call_compiled = keras.losses.Loss.__call__, CompileLoss.__call__
_thread = threading.local()


def _depth() -> int | None:
    return getattr(_thread, "depth", None)


@contextlib.contextmanager
def _at_depth(depth: int | None) -> Iterator[None]:
    before, _thread.depth = _depth(), depth
    try:
        yield
    finally:
        _thread.depth = before


@contextlib.contextmanager
def compile_losses(model: keras.Model, call_loss: LossCall | None = None) -> Iterator[None]:
    """Distinguish the losses given to `compile` from losses that they call, in this context.

    Keras 3.15 calls the losses of `compile` in `CompileLoss`, at depth 1. The depth is None outside of it.

    Args:
        model: A compiled model.
        call_loss: Replaces the call of a `compile` loss. Takes Keras' call, targets, outputs and sample weights.
    """

    def call_compiled(losses: CompileLoss, *args: Any, **kwargs: Any) -> Any:
        with _at_depth(0):
            return _call_compiled(losses, *args, **kwargs)

    def calling(original: Any) -> Any:
        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            before = _depth()
            with _at_depth(None if before is None else before + 1):
                if before != 0 or call_loss is None:
                    return original(loss, y_true, y_pred, sample_weight)
                return call_loss(functools.partial(original, loss), y_true, y_pred, sample_weight)

        return call

    # A user's class may override `__call__`, with its own reduction.
    classes = [type(loss) for loss in flat_losses(model) if isinstance(loss, keras.losses.Loss)]
    owners = {next(base for base in kind.__mro__ if "__call__" in vars(base)) for kind in classes}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(CompileLoss, "__call__", call_compiled))
        for owner in {keras.losses.Loss, *owners}:
            original = _call_loss if owner is keras.losses.Loss else owner.__call__
            stack.enter_context(mock.patch.object(owner, "__call__", calling(original)))
        yield


@contextlib.contextmanager
def loss_reduction(
    model: keras.Model,
    reduce_loss: LossReduction,
    reduce_added_loss: AddedLossReduction,
    call_loss: LossCall | None = None,
) -> Iterator[None]:
    """Reduce the losses of `compile` with `reduce_loss`, and added losses with `reduce_added_loss`, in this context.

    Keras 3.15 reduces every loss in `reduce_weighted_values`: it divides by the count of the calling replica, then by
    the number of replicas, which is wrong for uneven batches and masks (keras-team/keras#19246). Tracing is
    single-threaded, since the threads of MirroredStrategy alternate, so patching the module affects exactly the losses
    of the traced step.

    A loss object called by a loss of `compile` or by a metric is reduced as in Keras, over the local examples.

    Args:
        model: A compiled model.
        reduce_loss: Takes values, sample weight, mask, reduction and dtype.
        reduce_added_loss: Takes the model and a loss added by a layer.
        call_loss: As in `compile_losses`.
    """

    def reduce(*loss: Any) -> tf.Tensor:
        return reduce_loss(*loss) if _depth() == 1 else reduce_weighted_values(*loss)

    with compile_losses(model, call_loss), every_loss_reduction(reduce, reduce_added_loss):
        yield


@contextlib.contextmanager
def every_loss_reduction(reduce_loss: LossReduction, reduce_added_loss: AddedLossReduction) -> Iterator[None]:
    """Do the same as `loss_reduction` for every loss object, whatever calls it."""

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None,
               reduction: str | None = "sum_over_batch_size", dtype: Any = None) -> tf.Tensor:  # fmt: skip
        return reduce_loss(values, sample_weight, mask, reduction, dtype)

    with (
        mock.patch.object(loss_module, "reduce_weighted_values", reduce),
        mock.patch.object(loss_module, "scale_loss_for_distribution", lambda value: value),
        mock.patch.object(loss_module, "unscale_loss_for_distribution", lambda value: value),
        mock.patch.object(TensorFlowTrainer, "_aggregate_additional_loss", reduce_added_loss),
    ):
        yield


@contextlib.contextmanager
def local_losses() -> Iterator[None]:
    """Compute losses in this context from the examples of the calling replica only.

    Keras 3.15 divides losses by the number of replicas in every strategy scope.
    """
    aggregate = TensorFlowTrainer.__mro__[1]._aggregate_additional_loss
    with (
        mock.patch.object(loss_module, "scale_loss_for_distribution", lambda value: value),
        mock.patch.object(loss_module, "unscale_loss_for_distribution", lambda value: value),
        mock.patch.object(TensorFlowTrainer, "_aggregate_additional_loss", aggregate),
    ):
        yield


@contextlib.contextmanager
def masked_losses(reduce_loss: LossReduction) -> Iterator[None]:
    """Reduce every loss with a Keras mask inside this context with a function, and other losses as in Keras.

    Args:
        reduce_loss: Takes values, sample weight, mask, reduction and dtype.
    """

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None,
               reduction: str | None = "sum_over_batch_size", dtype: Any = None) -> tf.Tensor:  # fmt: skip
        reduces = reduce_weighted_values if mask is None else reduce_loss
        return reduces(values, sample_weight, mask, reduction, dtype)

    with mock.patch.object(loss_module, "reduce_weighted_values", reduce):
        yield


@contextlib.contextmanager
def own_loss_called(call: Callable[[Callable[..., Any], dict[str, Any]], tf.Tensor]) -> Iterator[None]:
    """Intercept the calls of an overridden `compute_loss` in this context.

    Args:
        call: Takes Keras' call and its keyword arguments `x`, `y`, `y_pred`, `sample_weight` and `training`.
    """
    original = keras.Model._compute_loss

    def compute(model: keras.Model, **arguments: Any) -> tf.Tensor:
        return call(functools.partial(original, model), arguments)

    with mock.patch.object(keras.Model, "_compute_loss", compute):
        yield


@contextlib.contextmanager
def collect_added_losses(collected: Callable[[], list[Any]]) -> Iterator[None]:
    """Collect losses added with `add_loss` in the list that `collected` returns, instead of in the layers.

    Keras 3.15 keeps added losses in layers, which replicas share. As replicas alternate when they communicate, one
    would read and clear the losses of another.
    """

    def add_loss(layer: keras.Layer, loss: Any) -> None:
        collected().extend(keras.tree.flatten(loss))

    losses = property(lambda layer: [*collected(), *layer._get_regularization_losses()])
    with mock.patch.object(keras.Layer, "add_loss", add_loss), mock.patch.object(keras.Layer, "losses", losses):
        yield


def flat_losses(model: keras.Model) -> list[Any]:
    """Return the loss objects and functions given to `compile`."""
    compiled = model._compile_loss
    return [] if compiled is None else [entry for entry in keras.tree.flatten(compiled._user_loss) if entry is not None]


def name_of(loss: Any) -> str:
    """Return the name of a loss from `flat_losses`."""
    return str(getattr(loss, "__name__", getattr(loss, "name", loss)))


def is_of_keras(loss: Any) -> bool:
    """Return whether a loss from `flat_losses` is Keras' own; `LossFunctionWrapper` keeps its function in `fn`."""
    module = str(getattr(getattr(loss, "fn", loss), "__module__", ""))
    return isinstance(loss, str) or module.startswith("keras.src.losses.")


def is_by_example(loss: Any) -> bool:
    """Return whether a loss from `flat_losses` has a value per example: one of Keras' own, over the last axis."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if name in ("circle", "Circle"):  # it compares all examples of a batch
        return False
    return is_of_keras(loss) and keras_model.reduces_last_axis(getattr(loss, "_fn_kwargs", {}))


@contextlib.contextmanager
def without_added_losses() -> Iterator[None]:
    """Make `Layer.losses` empty in this context, so that `compute_loss` adds nothing."""
    with mock.patch.object(keras.Layer, "losses", property(lambda layer: [])):
        yield
