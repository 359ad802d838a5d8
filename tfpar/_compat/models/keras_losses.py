"""Losses of compiled models in the parts that a reduction over a batch needs.

All of it is private. Written for Keras 3.15 and TensorFlow 2.21.
"""

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


# Keras as it is, for reductions that build on it.
reduce_weighted_values = keras_losses_in_call.reduce_of_these
apply_mask = loss_module.apply_mask
squeeze_or_expand_to_same_rank = loss_module.squeeze_or_expand_to_same_rank
aggregate_added_loss = TensorFlowTrainer.__mro__[1]._aggregate_additional_loss


# Keras as it is, before any patch. The replicas of MirroredStrategy are threads, which take turns where they
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
def losses_of_compile(model: keras.Model, call_loss: LossCall | None = None) -> Iterator[None]:
    """Tell the losses of `compile` from the losses that they call inside this context.

    Keras 3.15 calls those of `compile` in `CompileLoss`: at depth 1, and None outside of these.

    Args:
        model: A compiled model.
        call_loss: Calls a loss of `compile`. Takes Keras' call, and the targets, outputs and sample weights for it.
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

    # A user's class may replace the call, with a reduction of its own.
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
    """Reduce every loss of `compile` inside this context with `reduce_loss`, added losses with `reduce_added_loss`.

    Keras 3.15 divides a loss in one function, `reduce_weighted_values`, by the count of the replica that calls it, and
    then by the number of replicas: wrong for uneven batches and masks (keras-team/keras#19246 and the facts in the
    README). Tracing is single-threaded (the threads of MirroredStrategy take turns), so a patch of the module's
    attributes reaches every loss of the traced step and nothing else.

    A loss object that a loss of `compile` or a metric calls is reduced as in Keras, over the examples at hand.

    Args:
        model: A compiled model.
        reduce_loss: Takes values, sample weight, mask, reduction and dtype.
        reduce_added_loss: Takes the model and a loss that a layer adds.
        call_loss: As for `losses_of_compile`.
    """

    def reduce(*loss: Any) -> tf.Tensor:
        return reduce_loss(*loss) if _depth() == 1 else reduce_weighted_values(*loss)

    with losses_of_compile(model, call_loss), every_loss_reduction(reduce, reduce_added_loss):
        yield


@contextlib.contextmanager
def every_loss_reduction(reduce_loss: LossReduction, reduce_added_loss: AddedLossReduction) -> Iterator[None]:
    """Do what `loss_reduction` does for every loss object, whatever calls it."""

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
    """Compute every loss inside this context from the examples of the calling replica only.

    Keras 3.15 divides losses by the number of replicas wherever a strategy is in force.
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
    """Call an overridden `compute_loss` with a function inside this context; Keras 3.15 calls it as `_compute_loss`.

    Args:
        call: Takes Keras' call and its arguments by name: `x`, `y`, `y_pred`, `sample_weight` and `training`.
    """
    original = keras.Model._compute_loss

    def compute(model: keras.Model, **arguments: Any) -> tf.Tensor:
        return call(functools.partial(original, model), arguments)

    with mock.patch.object(keras.Model, "_compute_loss", compute):
        yield


@contextlib.contextmanager
def collect_added_losses(collected: Callable[[], list[Any]]) -> Iterator[None]:
    """Gather the losses that layers add with `add_loss` in the list that `collected` returns, instead of in the layers.

    Keras 3.15 keeps added losses in the layer objects. The replicas of a strategy share those and take turns wherever
    they communicate, so one replica would read and clear the losses of another.
    """

    def add_loss(layer: keras.Layer, loss: Any) -> None:
        collected().extend(keras.tree.flatten(loss))

    losses = property(lambda layer: [*collected(), *layer._get_regularization_losses()])
    with mock.patch.object(keras.Layer, "add_loss", add_loss), mock.patch.object(keras.Layer, "losses", losses):
        yield


def flat_losses(model: keras.Model) -> list[Any]:
    """Return the loss objects and functions of a compiled model (Keras 3.15 keeps them in `_compile_loss`)."""
    compiled = model._compile_loss
    return [] if compiled is None else [entry for entry in keras.tree.flatten(compiled._user_loss) if entry is not None]


def name_of(loss: Any) -> str:
    """Return the name of a loss of `flat_losses`."""
    return str(getattr(loss, "__name__", getattr(loss, "name", loss)))


def is_of_keras(loss: Any) -> bool:
    """Return whether a loss of `flat_losses` is one of Keras' own (Keras 3.15 keeps a wrapped function in `fn`)."""
    module = str(getattr(getattr(loss, "fn", loss), "__module__", ""))
    return isinstance(loss, str) or module.startswith("keras.src.losses.")


def is_by_example(loss: Any) -> bool:
    """Return whether a loss of `flat_losses` is known to have a value per example: Keras' own, over the last axis."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if name in ("circle", "Circle"):  # it compares all examples of a batch
        return False
    return is_of_keras(loss) and keras_model.reduces_last_axis(getattr(loss, "_fn_kwargs", {}))


@contextlib.contextmanager
def without_added_losses() -> Iterator[None]:
    """Empty `Layer.losses` inside this context, so that `compute_loss` adds nothing (Keras 3.15)."""
    with mock.patch.object(keras.Layer, "losses", property(lambda layer: [])):
        yield
