"""Sums and weights of losses over parts of a batch, and whether they add up to the loss of the batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpar.reduction.losses import dense_losses, loss_sums

ROUNDING = 1e-6  # relative to the largest part: parts may cancel

# The sum and weight of a loss, scalars.
LossSums = tuple[tf.Tensor, tf.Tensor]


def sums_of(loss: Any) -> LossSums | None:
    """Return the scalar sum and weight of a loss; None for a loss without reduction.

    Args:
        loss: The arguments of Keras' reduction: values, sample weight, mask, reduction and dtype.
    """
    if not reduces(*loss):
        return None
    values, sample_weight, mask, reduction, dtype = loss
    values = tf.cast(dense_losses(values, reduction), dtype)
    total, weight = loss_sums(values, sample_weight, mask, reduction or "", dtype)
    return total, tf.ones_like(total) if weight is None else tf.cast(weight, total.dtype)


def add_up(value: float, expected: float, tolerance: float, largest_part: float) -> bool:
    """Return whether the parts of a batch add up to its value.

    Args:
        value: The value of the parts together.
        expected: The value of the batch.
        tolerance: The largest relative difference.
        largest_part: The largest value of a part, whose rounding remains if parts cancel.
    """
    return abs(value - expected) <= max(tolerance * max(abs(value), abs(expected), 1e-12), ROUNDING * largest_part)


class PartialSums:
    """The sums of a loss in `call` for a batch and for its parts, which must add up.

    They do not for a similarity over `axis=0`, whose every value depends on the whole batch.

    Args:
        is_sum: Whether the loss is a sum; otherwise it is divided by its weight.
        whole: The sum and weight of the batch.
    """

    def __init__(self, is_sum: bool, whole: LossSums) -> None:
        self.is_sum, self.whole, self._parts = is_sum, whole, list[LossSums]()

    def add(self, part: LossSums) -> None:
        """Add the sum and weight of a part."""
        self._parts.append(part)

    def add_up(self, tolerance: float) -> bool:
        """Return whether the parts give the loss of the batch; True if no part computes it."""
        if not self._parts:
            return True
        total, weight = (float(sum(column)) for column in zip(*self._parts, strict=True))
        loss, largest = float(self.whole[0]), max(abs(float(part[0])) for part in self._parts)
        if not self.is_sum:
            total, loss = total / (weight or 1.0), loss / (float(self.whole[1]) or 1.0)
            largest /= abs(weight) or 1.0
        return add_up(total, loss, tolerance, largest)


def reduces(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> bool:
    """Return whether Keras reduces a loss to a scalar; takes the arguments of Keras' reduction."""
    return reduction not in (None, "none") and len(values.shape) > 0
