"""Losses of compiled models in the parts that a reduction over a batch needs.

All of it is private. Written for Keras 3.15 and TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfpar._compat import keras_losses_in_call, keras_model

LossReduction = Callable[[Any, Any, Any, str | None, Any], tf.Tensor]
AddedLossReduction = Callable[[keras.Model, Any], tf.Tensor]


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
def _depth_counted() -> Iterator[None]:
    """Count inside this context how deep loss objects call one another: 1 in one of `compile`, None outside of these.

    Keras 3.15 calls those of `compile` in `CompileLoss`.
    """

    def call_compiled(losses: CompileLoss, *args: Any, **kwargs: Any) -> Any:
        with _at_depth(0):
            return _call_compiled(losses, *args, **kwargs)

    def call_loss(loss: keras.losses.Loss, *args: Any, **kwargs: Any) -> Any:
        before = _depth()
        with _at_depth(None if before is None else before + 1):
            return _call_loss(loss, *args, **kwargs)

    with (
        mock.patch.object(CompileLoss, "__call__", call_compiled),
        mock.patch.object(keras.losses.Loss, "__call__", call_loss),
    ):
        yield


@contextlib.contextmanager
def loss_reduction(reduce_loss: LossReduction, reduce_added_loss: AddedLossReduction) -> Iterator[None]:
    """Reduce every loss of `compile` inside this context with `reduce_loss`, added losses with `reduce_added_loss`.

    Keras 3.15 divides a loss in one function, `reduce_weighted_values`, by the count of the replica that calls it, and
    then by the number of replicas: wrong for uneven batches and masks (keras-team/keras#19246 and the facts in the
    README). Tracing is single-threaded (the threads of MirroredStrategy take turns), so a patch of the module's
    attributes reaches every loss of the traced step and nothing else.

    A loss object that a loss of `compile` or a metric calls is reduced as in Keras, over the examples at hand.
    """

    def reduce(*loss: Any) -> tf.Tensor:
        return reduce_loss(*loss) if _depth() == 1 else reduce_weighted_values(*loss)

    with _depth_counted(), every_loss_reduction(reduce, reduce_added_loss):
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
def compute_loss_then(reduce_loss: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Pass the value of `compute_loss` through `reduce_loss`; Keras 3.15's step calls it as `_compute_loss`."""
    original = keras.Model._compute_loss

    def compute(model: keras.Model, *args: Any, **kwargs: Any) -> tf.Tensor:
        return reduce_loss(original(model, *args, **kwargs))

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


def is_of_keras(loss: Any) -> bool:
    """Return whether a loss of `flat_losses` is one of Keras' own (Keras 3.15 keeps a wrapped function in `fn`)."""
    return isinstance(loss, str) or keras_model.is_of_keras(getattr(loss, "fn", loss))


def is_by_example(loss: Any) -> bool:
    """Return whether a loss of `flat_losses` is known to have a value per example: Keras' own, over the last axis."""
    return is_of_keras(loss) and keras_model.reduces_last_axis(getattr(loss, "_fn_kwargs", {}))


@contextlib.contextmanager
def without_added_losses() -> Iterator[None]:
    """Empty `Layer.losses` inside this context, so that `compute_loss` adds nothing (Keras 3.15)."""
    with mock.patch.object(keras.Layer, "losses", property(lambda layer: [])):
        yield
