"""Losses that `call` computes where the parts of a batch run one after the other, as micro-batches do.

    whole batch, before     what masks and weights need ── weight 7 ─┐
    micro-batch 0           sum 3.0 ─────────────────────────────────┼─ 3.0 / 7
    micro-batch 1           sum 2.0 ─────────────────────────────────┴─ 2.0 / 7

Replicas add up sums and weights while they are called. A micro-batch cannot wait for those after it, so what it needs
of the whole batch is computed before. Of each loss that is as little as can be, its *way*:

    "alone"      nothing: every example has equally many values, and the loss is a mean over them
    "sum"        nothing: the loss is a sum, which counts more in a part than in the mean over parts
    "by weight"  the weight of the whole batch, which depends on masks and weights that are not trained
    "whole"      its sum too: a layer makes something of its value that is not linear, or its weights are trained
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar._compat import keras_losses
from tfpar.reduction.losses import dense_losses, loss_sums
from tfpar.reduction.whole_batch import reduces

Way = Literal["alone", "sum", "by weight", "whole"]
_KNOW_ENOUGH = ("alone", "sum")
_Sums = tuple[tf.Tensor, tf.Tensor]


def sums_of(loss: Any) -> _Sums | None:
    """Return the sum of a loss over the examples at hand and its weight, scalars; None if it is not reduced.

    Args:
        loss: What Keras reduces: values, sample weight, mask, reduction and dtype.
    """
    if not reduces(*loss):
        return None
    values, sample_weight, mask, reduction, dtype = loss
    values = tf.convert_to_tensor(dense_losses(values, reduction), dtype)
    total, weight = loss_sums(values, sample_weight, mask, reduction or "", dtype)
    return total, tf.ones_like(total) if weight is None else tf.cast(weight, total.dtype)


@contextlib.contextmanager
def _each(reduce: Callable[[Any, _Sums], Any]) -> Iterator[None]:
    """Let a function reduce each loss that `call` computes inside this context, given its sum and weight."""

    def reduce_all(*loss: Any) -> Any:
        sums = sums_of(loss)
        return keras_losses.reduce_of_these(*loss) if sums is None else reduce(loss, sums)

    with keras_losses.losses_in_call(reduce_all):
        yield


def cheapest_ways(run: Callable[[], Any], trainable: Sequence[Any]) -> tuple[Way, ...]:
    """Return what each loss that `call` computes needs of the whole batch, unless more is made of it than a mean.

    It is read off the graph, not off values: a batch may happen to have nothing to mask.

    Args:
        run: Runs the model on a batch of a known size.
        trainable: The TensorFlow variables that are trained.
    """
    ways: list[Way] = []

    def trace() -> None:
        found: list[Any] = []

        def note(loss: Any, sums: _Sums) -> tf.Tensor:
            values, sample_weight, mask, reduction, _ = loss
            by_weight = mask is not None or (reduction == "mean_with_sample_weight" and sample_weight is not None)
            # A size that is not known although that of the batch is: a layer leaves some values out.
            counts = by_weight or not dense_losses(values, reduction).shape.is_fully_defined()
            found.append("sum" if reduction == "sum" else sums[1] if counts else "alone")
            return tf.math.divide_no_nan(*sums)

        with keras.StatelessScope(), tf.GradientTape(persistent=True) as tape, _each(note):
            run()
        for one in found:
            way: Any = one
            if not isinstance(one, str):
                gradients = tape.gradient(one, list(trainable))
                way = "by weight" if all(each is None for each in gradients) else "whole"
            ways.append(way)

    tf.function(trace, autograph=False).get_concrete_function()
    return tuple(ways)


def other_ways(ways: Sequence[Way]) -> list[tuple[Way, ...]]:
    """Return, in the order of their costs, what losses may need of which a layer makes more than a mean.

    Args:
        ways: What they need at least.
    """
    sums_alone: list[Way] = ["alone" if way == "sum" else way for way in ways]
    all_whole: list[Way] = ["whole" for _ in ways]
    return [tuple(sums_alone), tuple(all_whole)]


def needs_pass(ways: Sequence[Way]) -> bool:
    """Say whether losses need something of the whole batch, so that `counting` must find it."""
    return any(way not in _KNOW_ENOUGH for way in ways)


def loss_of_part(way: Way, sums: _Sums, of_batch: _Sums, part: Any) -> tf.Tensor:
    """Return a loss as a part of a batch sees it, a scalar, such that the mean over parts is that of the whole batch.

    Its gradient is the part's own of the loss over the whole batch, to be weighted by the size of the part as well.

    Args:
        way: What is known of the whole batch.
        sums: The sum and weight of the part.
        of_batch: Those of the whole batch, as far as the way says.
        part: The part of the batch that it is, from 0 to 1, a scalar.
    """
    total, weight = sums
    if way == "alone":
        return tf.math.divide_no_nan(total, weight)
    all_total, all_weight = (tf.cast(one, total.dtype) for one in of_batch)
    part = tf.cast(part, total.dtype)
    if way == "sum":
        return tf.math.divide_no_nan(total, part)
    if way == "by weight":
        return tf.math.divide_no_nan(total, all_weight * part)
    value = tf.math.divide_no_nan(all_total, all_weight)
    own = tf.math.divide_no_nan(total - value * weight, all_weight)  # with the gradient of total / weight
    return value + tf.math.divide_no_nan(own - tf.stop_gradient(own), part)


@contextlib.contextmanager
def counting(ways: Sequence[Way], found: list[tf.Tensor]) -> Iterator[None]:
    """Note, for each loss that `call` computes on the whole batch inside this context, what its parts need.

    Args:
        ways: Of the losses, in their order.
        found: Gets the sum and weight of each, float64 `[2]`; zero for what is not needed.
    """

    def note(loss: Any, sums: _Sums) -> tf.Tensor:
        way, nothing = ways[len(found)], tf.zeros([], tf.float64)
        total, weight = (tf.cast(one, tf.float64) for one in sums)
        found.append(tf.stack([total if way == "whole" else nothing, nothing if way in _KNOW_ENOUGH else weight]))
        return tf.math.divide_no_nan(*sums)

    with _each(note):
        yield


@contextlib.contextmanager
def in_part(ways: Sequence[Way], of_batch: tf.Tensor, part: tf.Tensor) -> Iterator[list[tuple[Way, tf.Tensor]]]:
    """Let every loss that `call` computes inside this context be one of a part of the batch.

    Args:
        ways: Of the losses, in their order, and perhaps of others after them; "alone" where none is left.
        of_batch: What `counting` found, stacked, float64 `[losses, 2]`.
        part: The part of the batch that it is, a scalar.

    Yields:
        A list that gets the way and the value of each loss.
    """
    found: list[tuple[Way, tf.Tensor]] = []

    def reduce(loss: Any, sums: _Sums) -> tf.Tensor:
        index = len(found)
        way: Way = ways[index] if index < len(ways) else "alone"
        of_this = sums if way == "alone" else (of_batch[index, 0], of_batch[index, 1])
        # As Keras divides it, where nothing else is needed.
        value = keras_losses.reduce_of_these(*loss) if way == "alone" else loss_of_part(way, sums, of_this, part)
        found.append((way, value))
        return value

    with _each(reduce):
        yield found


class PartTrial:
    """The losses that `call` computes, recorded on a batch and then as its parts will see them.

    Args:
        ways: Of the losses, in their order.
        num_examples: Of the batch; the first part of it is one example, the second the others.
    """

    def __init__(self, ways: Sequence[Way], num_examples: int) -> None:
        self._ways, self._num_examples = ways, num_examples
        self._recorded: list[_Sums] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside this context the losses of the batch."""
        self._recorded = []

        def record(loss: Any, sums: _Sums) -> tf.Tensor:
            self._recorded.append(sums)
            return tf.math.divide_no_nan(*sums)

        with _each(record):
            yield

    @contextlib.contextmanager
    def replaying(self, start: int) -> Iterator[None]:
        """Let losses be those of a part inside this context.

        Args:
            start: The number of the part's first example.
        """
        recorded = zip(self._ways, self._recorded, strict=True)
        part = (1 if start == 0 else self._num_examples - 1) / self._num_examples
        with _each(lambda loss, sums: self._replayed(*next(recorded), sums, part)):
            yield

    def _replayed(self, way: Way, of_batch: _Sums, sums: _Sums, part: float) -> tf.Tensor:
        return loss_of_part(way, sums, of_batch, part)
