"""Losses inside of `call` for micro-batches.

    first pass, whole batch    masks and weights ── weight 7 ─┐
    micro-batch 0              sum 3.0 ───────────────────────┼─ 3.0 / 7
    micro-batch 1              sum 2.0 ───────────────────────┴─ 2.0 / 7

Replicas all-reduce sums and weights inside of `call`. Micro-batches run one after another, so a first pass computes
their totals over the whole batch. The *way* of a loss is the smallest set of totals that it needs:

    "alone"  no totals: each example has the same number of values, and the loss is a mean over them
    "sum"    no totals: the loss is a sum, divided by the fraction of the batch in the micro-batch
    "whole"  total sum and weight: masks or weights divide it, or a layer uses it in a nonlinear function
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar._compat.models import keras_losses_in_call
from tfpar.reduction.losses import dense_losses
from tfpar.reduction.sums_of_parts import LossSums, sums_of

Way = Literal["alone", "sum", "whole"]


@contextlib.contextmanager
def _each(reduce: Callable[[Any, LossSums], Any]) -> Iterator[None]:
    """Reduce each loss that `call` computes inside this context by a function of its sum and weight."""

    def reduce_all(*loss: Any) -> Any:
        sums = sums_of(loss)
        return keras_losses_in_call.reduce_of_these(*loss) if sums is None else reduce(loss, sums)

    with keras_losses_in_call.losses_in_call(reduce_all):
        yield


def cheapest_ways(run: Callable[[], Any]) -> tuple[Way, ...]:
    """Return the cheapest way of each loss that `call` computes, valid if layers use the losses linearly.

    The ways follow from a trace and not from values: the first batch may have nothing to mask.

    Args:
        run: Runs the model on rows of a known number.
    """
    ways: list[Way] = []

    def note(loss: Any, sums: LossSums) -> tf.Tensor:
        values, sample_weight, mask, reduction, _ = loss
        by_weight = mask is not None or (reduction == "mean_with_sample_weight" and sample_weight is not None)
        # The number of rows is known, so an unknown size means that a layer filters values.
        divides = by_weight or not dense_losses(values, reduction).shape.is_fully_defined()
        ways.append("sum" if reduction == "sum" else "whole" if divides else "alone")
        return tf.math.divide_no_nan(*sums)

    def trace() -> None:
        with keras.StatelessScope(), _each(note):
            run()

    tf.function(trace, autograph=False).get_concrete_function()
    return tuple(ways)


def needs_pass(ways: Sequence[Way]) -> bool:
    """Return whether losses need a first pass over the whole batch, inside of `counting`."""
    return "whole" in ways


def loss_of_part(way: Way, sums: LossSums, of_batch: LossSums, part: Any) -> tf.Tensor:
    """Return the loss of one part of a batch, a scalar; the mean over all parts is the loss of the whole batch.

    The same holds for its gradient. Both means weight a part by its fraction of the batch.

    Args:
        way: The way of the loss.
        sums: The sum and weight of the part.
        of_batch: The sum and weight of the whole batch; zero where the way does not need them.
        part: The fraction of the batch in this part, from 0 to 1, a scalar.
    """
    total, weight = sums
    if way == "alone":
        return tf.math.divide_no_nan(total, weight)
    all_total, all_weight = (tf.cast(one, total.dtype) for one in of_batch)
    part = tf.cast(part, total.dtype)
    if way == "sum":
        return tf.math.divide_no_nan(total, part)
    value = tf.math.divide_no_nan(all_total, all_weight)
    own = tf.math.divide_no_nan(total - value * weight, all_weight)  # with the gradient of total / weight
    return value + tf.math.divide_no_nan(own - tf.stop_gradient(own), part)


@contextlib.contextmanager
def counting(ways: Sequence[Way], found: list[tf.Tensor]) -> Iterator[None]:
    """Collect the totals of each loss that `call` computes on the whole batch inside this context.

    Args:
        ways: The ways of the losses, in their order.
        found: Receives the sum and weight of each loss, float64 `[2]`; zero where the way does not need them.
    """

    def note(loss: Any, sums: LossSums) -> tf.Tensor:
        way, nothing = ways[len(found)], tf.zeros([], tf.float64)
        total, weight = (tf.cast(one, tf.float64) for one in sums)
        found.append(tf.stack([total, weight] if way == "whole" else [nothing, nothing]))
        return tf.math.divide_no_nan(*sums)

    with _each(note):
        yield


@contextlib.contextmanager
def in_part(ways: Sequence[Way], of_batch: tf.Tensor, part: tf.Tensor) -> Iterator[list[tuple[Way, tf.Tensor]]]:
    """Compute every loss of `call` inside this context as the loss of one part of the batch.

    Args:
        ways: The ways of the losses, in their order. There may be more ways than losses; losses without one are
            "alone".
        of_batch: The totals from `counting`, stacked, float64 `[losses, 2]`.
        part: The fraction of the batch in this part, a scalar.

    Yields:
        A list that receives the way and the value of each loss.
    """
    found: list[tuple[Way, tf.Tensor]] = []

    def reduce(loss: Any, sums: LossSums) -> tf.Tensor:
        index = len(found)
        way: Way = ways[index] if index < len(ways) else "alone"
        of_this = sums if way == "alone" else (of_batch[index, 0], of_batch[index, 1])
        # Without totals, the division of Keras.
        value = (
            keras_losses_in_call.reduce_of_these(*loss) if way == "alone" else loss_of_part(way, sums, of_this, part)
        )
        found.append((way, value))
        return value

    with _each(reduce):
        yield found
