"""Losses computed in a model's `call`, and metrics of whole-batch scalars (Keras 3.15)."""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

LossReduction = Callable[[Any, Any, Any, str | None, Any], tf.Tensor]

_reduce = loss_module.reduce_weighted_values  # before any patch

# The replicas of MirroredStrategy are threads that alternate when they communicate.
_thread = threading.local()


def reduce_of_these(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> tf.Tensor:
    """Reduce the losses of the local examples as Keras does in a graph.

    Keras 3.15 reduces an empty tensor to 0 if its shape is unknown, but returns it unchanged if its shape is known
    (`reduce_values`), as in an eager probe in which a layer selects no examples.

    Args:
        values: Losses `[batch, ...]`.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype of the computation.
    """
    reduced = _reduce(values, sample_weight, mask, reduction, dtype)
    return tf.reduce_sum(reduced) if reduction not in (None, "none") and reduced.shape == (0,) else reduced


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """Mark the ops of this thread in this context as part of a model's `call`."""
    before = getattr(_thread, "in_call", False)
    _thread.in_call = True
    try:
        yield
    finally:
        _thread.in_call = before


@contextlib.contextmanager
def losses_in_call(reduce_loss: LossReduction | None = None) -> Iterator[None]:
    """Reduce the losses of a model's `call` with `reduce_loss` in this context.

    Keras 3.15 reduces every loss in `reduce_weighted_values`, which also divides by the number of replicas.

    Args:
        reduce_loss: Takes values, sample weight, mask, reduction and dtype. Defaults to Keras' own reduction over the
            local examples.
    """
    outside = loss_module.reduce_weighted_values

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None,
               reduction: str | None = "sum_over_batch_size", dtype: Any = None) -> tf.Tensor:  # fmt: skip
        inside = reduce_of_these if reduce_loss is None else reduce_loss
        function = inside if getattr(_thread, "in_call", False) else outside
        return function(values, sample_weight, mask, reduction, dtype)

    with mock.patch.object(loss_module, "reduce_weighted_values", reduce), undivided():
        yield


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Disable Keras' division of losses by the number of replicas in this context."""
    with mock.patch.object(loss_module, "scale_loss_for_distribution", lambda value: value):
        yield


def _is_scalar(values: Any, sample_weight: Any) -> bool:
    return sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0


def _is_number(values: Any) -> bool:
    """Return whether a value is a Python or NumPy number, which is equal on all replicas."""
    return isinstance(values, numbers.Number)


@contextlib.contextmanager
def scalars_weighted(
    weight: Callable[[tf.Tensor], tf.Tensor | None], weighs_sums: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Weight each scalar passed to a metric in this context, because it is a value of the whole batch.

    Keras 3.15 gives scalars weight one, but every replica passes a scalar for the same batch. Scalars in a
    `keras.metrics.Mean` are means; those in a `keras.metrics.Sum` are per-replica sums, which need no weight, or counts
    of calls.

    Args:
        weight: Takes the scalar and returns its weight, a scalar: the fraction of the batch on the calling replica.
            None means one.
        weighs_sums: Returns whether scalars in a `Sum` are values of the whole batch too.
    """

    def weighting(kind: type[keras.Metric]) -> Callable[..., None]:
        original = kind.update_state

        def update_state(metric: keras.Metric, values: Any, sample_weight: Any = None) -> None:
            is_whole = kind is keras.metrics.Mean or _is_number(values) or weighs_sums()
            if is_whole and _is_scalar(values, sample_weight):
                sample_weight = weight(tf.convert_to_tensor(values))
            original(metric, values, sample_weight)

        return update_state

    with contextlib.ExitStack() as stack:
        for kind in (keras.metrics.Mean, keras.metrics.Sum):
            stack.enter_context(mock.patch.object(kind, "update_state", weighting(kind)))
        yield


@contextlib.contextmanager
def scalars_noted(note: Callable[[keras.Metric, tf.Tensor], Any]) -> Iterator[None]:
    """Pass each unweighted scalar for a `Mean` or `Sum` to a function in this context, instead of to the metric.

    A number as weight counts as unweighted: Keras 3.15 weights the losses of outputs with the batch size.

    Args:
        note: Takes the metric and the scalar. Not called for numbers in a `Sum`, which `scalars_weighted` handles.
    """

    def noting(kind: type[keras.Metric]) -> Callable[..., None]:
        original = kind.update_state

        def update_state(metric: keras.Metric, values: Any, sample_weight: Any = None) -> None:
            if not _is_scalar(values, None if _is_number(sample_weight) else sample_weight):
                original(metric, values, sample_weight)
            elif kind is keras.metrics.Mean or not _is_number(values):
                note(metric, tf.convert_to_tensor(values))

        return update_state

    with contextlib.ExitStack() as stack:
        for kind in (keras.metrics.Mean, keras.metrics.Sum):
            stack.enter_context(mock.patch.object(kind, "update_state", noting(kind)))
        yield
