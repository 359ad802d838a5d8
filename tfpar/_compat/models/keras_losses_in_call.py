"""Losses computed inside a model's `call`, apart from those that `compile` was given; and means of whole batches.

Written for Keras 3.15, as `tfpar._compat.models.keras_model`, which is at its full length.
"""

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

# The replicas of MirroredStrategy are threads, which take turns where they communicate.
_thread = threading.local()


def reduce_of_these(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> tf.Tensor:
    """Reduce the losses of the given examples, as Keras does in a graph.

    Keras 3.15 returns a tensor without values as it is where it knows its shape (`reduce_values`), as in an eager trial
    of a part from which a layer picks no example, and 0 where it does not.

    Args:
        values: Losses `[batch, ...]`.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype in which to compute.
    """
    reduced = _reduce(values, sample_weight, mask, reduction, dtype)
    return tf.reduce_sum(reduced) if reduction not in (None, "none") and reduced.shape == (0,) else reduced


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """Mark the operations of this thread inside this context as part of a model's `call`."""
    before = getattr(_thread, "in_call", False)
    _thread.in_call = True
    try:
        yield
    finally:
        _thread.in_call = before


@contextlib.contextmanager
def losses_in_call(reduce_loss: LossReduction | None = None) -> Iterator[None]:
    """Reduce the losses of a model's `call` inside this context with `reduce_loss`.

    Keras 3.15 has one function for every loss, `reduce_weighted_values`, and divides by the number of replicas in it.

    Args:
        reduce_loss: Takes values, sample weight, mask, reduction and dtype; None for Keras' own reduction over the
            examples at hand.
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
    """Prevent Keras 3.15's division of losses by the number of replicas inside this context, under a strategy."""
    with mock.patch.object(loss_module, "scale_loss_for_distribution", lambda value: value):
        yield


def _is_scalar(values: Any, sample_weight: Any) -> bool:
    return sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0


def _is_number(values: Any) -> bool:
    """Return whether a value is a number of Python or NumPy: the same for every part of a batch."""
    return isinstance(values, numbers.Number)


@contextlib.contextmanager
def scalars_weighted(
    weight: Callable[[tf.Tensor], tf.Tensor | None], weighs_sums: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Weight each scalar that a metric counts inside this context, because it is a value of a whole batch.

    Keras 3.15 counts each with weight one, and every replica has such a scalar for the same batch. `keras.metrics.Mean`
    counts means, and `keras.metrics.Sum` sums, which need no weight, or the number of its calls.

    Args:
        weight: Takes the scalar and returns its weight: the share of the batch's examples that the calling replica
            counts, a scalar; None for one.
        weighs_sums: Whether a scalar in a `Sum` is one of the whole batch too, as each replica has it.
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
    """Call a function with each scalar that a `Mean` or `Sum` counts inside this context, without a tensor of weights.

    Keras 3.15 counts the losses of outputs with the size of the batch as weight.

    Args:
        note: Takes the metric, which does not count the scalar, and the scalar; not called for a number in a `Sum`,
            which `scalars_weighted` counts once.
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
