"""Losses computed in a model's `call`, for micro-batches.

    first pass, whole batch    masks and weights ── weight 7 ─┐
    micro-batch 0              sum 3.0 ───────────────────────┼─ 3.0 / 7
    micro-batch 1              sum 2.0 ───────────────────────┴─ 2.0 / 7

Replicas all-reduce sums and weights inside `call`. Micro-batches run one after another, so a first pass computes the
totals over the whole batch where a loss needs them. The *way* of a loss:

    "alone"  needs no totals: a mean over examples with equally many values
    "sum"    needs no totals: a sum, divided by the micro-batch's fraction of the batch
    "whole"  needs the total sum and weight: masks or weights divide it, or a layer uses it nonlinearly
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar._compat.models import keras_losses_in_call
from tfpar.reduction.losses import dense_losses
from tfpar.reduction.partial_sums import LossSums, sums_of

Way = Literal["alone", "sum", "whole"]


@contextlib.contextmanager
def _each(reduce: Callable[[Any, LossSums], Any]) -> Iterator[None]:
    """Reduce each loss that `call` computes in this context with a function of its sum and weight."""

    def reduce_all(*loss: Any) -> Any:
        sums = sums_of(loss)
        return keras_losses_in_call.reduce_of_these(*loss) if sums is None else reduce(loss, sums)

    with keras_losses_in_call.losses_in_call(reduce_all):
        yield


def cheapest_ways(run: Callable[[], Any]) -> tuple[Way, ...]:
    """Return the cheapest way of each loss that `call` computes, if layers use the losses linearly.

    The ways are read from a trace, not from values: the first batch may have nothing to mask.

    Args:
        run: Runs the model on a known number of rows.
    """
    ways: list[Way] = []

    def note(loss: Any, sums: LossSums) -> tf.Tensor:
        values, sample_weight, mask, reduction, _ = loss
        by_weight = mask is not None or (reduction == "mean_with_sample_weight" and sample_weight is not None)
        # The number of rows is known, so a layer filters values if the size is unknown.
        divides = by_weight or not dense_losses(values, reduction).shape.is_fully_defined()
        ways.append("sum" if reduction == "sum" else "whole" if divides else "alone")
        return tf.math.divide_no_nan(*sums)

    def trace() -> None:
        with keras.StatelessScope(), _each(note):
            run()

    tf.function(trace, autograph=False).get_concrete_function()
    return tuple(ways)


def needs_pass(ways: Sequence[Way]) -> bool:
    """Return whether losses need a first pass over the whole batch, in `counting`."""
    return "whole" in ways


def loss_of_part(way: Way, sums: LossSums, totals: LossSums, part: Any) -> tf.Tensor:
    """Return the scalar loss of one part of a batch, scaled for a mean over the parts.

    The mean over all parts, weighted by their fractions of the batch, is the loss of the whole batch. The same holds
    for the gradient.

    Args:
        way: The way of the loss.
        sums: The sum and weight of the part.
        totals: The sum and weight of the whole batch; zero if the way does not need them.
        part: Scalar, the fraction of the batch in this part, from 0 to 1.
    """
    total, weight = sums
    if way == "alone":
        return tf.math.divide_no_nan(total, weight)
    all_total, all_weight = (tf.cast(value, total.dtype) for value in totals)
    part = tf.cast(part, total.dtype)
    if way == "sum":
        return tf.math.divide_no_nan(total, part)
    value = tf.math.divide_no_nan(all_total, all_weight)
    own = tf.math.divide_no_nan(total - value * weight, all_weight)  # with the gradient of total / weight
    return value + tf.math.divide_no_nan(own - tf.stop_gradient(own), part)


@contextlib.contextmanager
def counting(ways: Sequence[Way], totals: list[tf.Tensor]) -> Iterator[None]:
    """Collect the totals of each loss that `call` computes on the whole batch in this context.

    Args:
        ways: The way of each loss.
        totals: Receives the sum and weight of each loss, float64 `[2]`; zero if the way does not need them.
    """

    def note(loss: Any, sums: LossSums) -> tf.Tensor:
        way, zero = ways[len(totals)], tf.zeros([], tf.float64)
        total, weight = (tf.cast(value, tf.float64) for value in sums)
        totals.append(tf.stack([total, weight] if way == "whole" else [zero, zero]))
        return tf.math.divide_no_nan(*sums)

    with _each(note):
        yield


@contextlib.contextmanager
def in_part(ways: Sequence[Way], totals: tf.Tensor, part: tf.Tensor) -> Iterator[list[tuple[Way, tf.Tensor]]]:
    """Compute every loss of `call` in this context as the loss of one part of the batch.

    Args:
        ways: The way of each loss; losses beyond them are "alone".
        totals: The totals from `counting`, stacked, float64 `[losses, 2]`.
        part: Scalar, the fraction of the batch in this part.

    Yields:
        A list that receives the way and the value of each loss.
    """
    losses: list[tuple[Way, tf.Tensor]] = []

    def reduce(loss: Any, sums: LossSums) -> tf.Tensor:
        index = len(losses)
        way: Way = ways[index] if index < len(ways) else "alone"
        if way == "alone":  # as Keras divides it
            value = keras_losses_in_call.reduce_of_these(*loss)
        else:
            value = loss_of_part(way, sums, (totals[index, 0], totals[index, 1]), part)
        losses.append((way, value))
        return value

    with _each(reduce):
        yield losses
