"""Reduce losses over replicas as (sum, weight) pairs, divided once by the weight of the whole batch.

    replica 0   loss sum 3.0, weight 4 ─┐                        ┌─ value 5.0 / 7, gradient of 3.0 / 7
                                        ├─ 5.0 over 7 examples ──┤
    replica 1   loss sum 2.0, weight 3 ─┘                        └─ value 5.0 / 7, gradient of 2.0 / 7

Every replica has the value of the global loss, so that Keras' loss weights, sum over outputs and loss trackers compute
what they compute on one device. The gradient on a replica is that of its own term; summed over the replicas it is the
gradient of the global loss. Nothing is averaged locally or divided by the number of replicas, so per-replica batches
may differ in size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat.models import keras_losses
from tfpar.reduction.replicas import sum_without_gradient

ONE_VALUE = "With several replicas or micro-batches a loss must return one value per example"
WAY_OUT = "Reduce over the last axis only, and let Keras average over the batch."


def global_mean(
    total: tf.Tensor, weight: tf.Tensor, all_weight: tf.Tensor | None = None, partial_values: bool = False
) -> tf.Tensor:
    """Divide the sum of `total` over all replicas by that of `weight`; zero where the weight is zero.

    Args:
        total: Scalar, the weighted sum of this replica.
        weight: Scalar, the weight of this replica in the divisor. It has no gradient.
        all_weight: Scalar, the sum of all weights if known; None all-reduces `weight`.
        partial_values: Whether to return this replica's term, for a caller that sums the terms.

    Returns:
        Scalar: the global mean, with the gradient of this replica's term.
    """
    part = tf.math.divide_no_nan(total, sum_without_gradient(weight) if all_weight is None else all_weight)
    return part if partial_values else part + (sum_without_gradient(part) - tf.stop_gradient(part))


def global_sum(total: tf.Tensor, partial_values: bool = False) -> tf.Tensor:
    """Return the sum of a scalar over all replicas, with the gradient of this replica's term.

    Args:
        total: Scalar, the sum of this replica.
        partial_values: Whether to return this replica's term, for a caller that sums the terms.
    """
    return total if partial_values else total + (sum_without_gradient(total) - tf.stop_gradient(total))


class BatchWeights(NamedTuple):
    """The sizes of the per-replica batch and of the global batch, and the weight of an example.

    Args:
        example_weight: The weight of an example in the loss; less than 1 if several replicas compute it.
        local_size: The size of the per-replica batch; None if unknown.
        global_size: The size of the global batch, or a function that sums it; None sums the local sizes.
        partial_values: Whether the value of a loss is this replica's term, for a caller that sums the terms.
        sum_divisors: Sums a divisor over all parts of the batch; None for an all-reduce.
    """

    example_weight: float | tf.Tensor = 1.0
    local_size: tf.Tensor | None = None
    global_size: tf.Tensor | Callable[[], tf.Tensor] | None = None
    partial_values: bool = False
    sum_divisors: Callable[[tf.Tensor], tf.Tensor] | None = None

    def size_of_all(self, dtype: Any) -> tf.Tensor | None:
        """Return the size of the global batch; None if it is unknown, or if divisors are summed instead."""
        if self.global_size is None:
            if self.local_size is None or self.sum_divisors is not None:
                return None
            return sum_without_gradient(tf.cast(self.example_weight, dtype) * tf.cast(self.local_size, dtype))
        return tf.cast(self.global_size() if callable(self.global_size) else self.global_size, dtype)


ALONE = BatchWeights()


def reduce_loss(
    values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any, counts: BatchWeights = ALONE
) -> tf.Tensor:
    """Reduce one loss over the global batch, as Keras' `reduction` does on one device.

    Args:
        values: Losses `[batch, ...]` of this replica's examples.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None; masked values count in no divisor.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype in which to compute.
        counts: The sizes of the per-replica and the global batch.

    Returns:
        Scalar loss over the global batch.

    Raises:
        ValueError: If the loss is already a scalar or has no reduction, so that it has no value per example.
    """
    values = tf.cast(dense_losses(values, reduction), dtype)
    if values.shape.rank == 0:
        raise ValueError(f"{ONE_VALUE}, received a scalar: the loss reduces over the batch itself. {WAY_OUT}")
    if reduction in (None, "none"):
        raise ValueError(
            "On replicas and in micro-batches a loss needs a reduction, received reduction=None. Use "
            "'sum_over_batch_size', 'sum', 'mean' or 'mean_with_sample_weight'."
        )
    example_weight = tf.cast(counts.example_weight, values.dtype)
    total, weight = loss_sums(values, sample_weight, mask, reduction, dtype)
    if weight is None:
        return global_sum(example_weight * total, counts.partial_values)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        all_weight = None
    elif mask is None:
        all_weight = _num_of_all(weight, counts)
    elif counts.sum_divisors is None:
        # Sums the mask, not the number of values, because the mask needs no result of the forward pass.
        entries = sum_without_gradient(example_weight * tf.reduce_sum(tf.cast(mask, values.dtype)))
        all_weight = entries * _values_per_entry(values, sample_weight, mask)
    else:
        all_weight = None
    return _mean(example_weight * total, example_weight * weight, all_weight, counts)


def dense_losses(values: Any, reduction: str | None) -> tf.Tensor:
    """Return losses as a dense tensor; as in Keras 3.15, ragged losses need rows of equal length or a sum.

    Args:
        values: `[batch, ...]`, or a scalar.
        reduction: A reduction of `keras.losses.Loss`.

    Raises:
        ValueError: If rows have different lengths and the reduction is not "sum".
    """
    if not isinstance(values, tf.RaggedTensor):
        return tf.convert_to_tensor(values)
    rows, lengths = values, []
    while isinstance(rows, tf.RaggedTensor):
        lengths.append(rows.uniform_row_length)
        rows = rows.values
    if any(length is None for length in lengths) and reduction != "sum":
        raise ValueError(
            f"A loss that returns rows of different lengths needs reduction='sum', as in Keras, and it has "
            f"{reduction!r}. Let it return one value per example, such as tf.reduce_mean(values, axis=-1)."
        )
    return values.to_tensor()


def loss_sums(
    values: tf.Tensor, sample_weight: Any, mask: Any, reduction: str, dtype: Any
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Return the weighted sum of losses and the divisor that Keras uses on one device; divisor None for a plain sum.

    Args:
        values: Losses `[batch, ...]`.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None; masked values count in no divisor.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype in which to compute.
    """
    total = keras_losses.reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype)
    if reduction == "sum":
        return total, None
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = keras_losses.apply_mask(sample_weight, mask, dtype=values.dtype, reduction="sum")
        _, weights = keras_losses.squeeze_or_expand_to_same_rank(values, tf.cast(weights, values.dtype))
        return total, tf.reduce_sum(weights)
    if mask is None:
        return total, tf.cast(_num_weighted(values, sample_weight, None), values.dtype)
    return total, tf.reduce_sum(tf.cast(mask, values.dtype)) * _values_per_entry(values, sample_weight, mask)


def _mean(total: tf.Tensor, weight: tf.Tensor, all_weight: tf.Tensor | None, counts: BatchWeights) -> tf.Tensor:
    if all_weight is None and counts.sum_divisors is not None:
        all_weight = counts.sum_divisors(weight)
    return global_mean(total, weight, all_weight, counts.partial_values)


def mean_of_sums(total: tf.Tensor, weight: tf.Tensor, counts: BatchWeights = ALONE) -> tf.Tensor:
    """Divide a scalar sum by a scalar weight, each summed over the whole batch."""
    example_weight = tf.cast(counts.example_weight, total.dtype)
    return _mean(example_weight * total, example_weight * weight, None, counts)


def reduce_kind(kind: str | None, value: tf.Tensor, counts: BatchWeights) -> tf.Tensor:
    """Reduce the scalar of one part to that of the whole batch.

    Args:
        kind: Whether the scalar is a "sum" or a "mean" over examples; None for a mean.
        value: The scalar of this part.
        counts: The sizes of the per-replica and the global batch.
    """
    example_weight = tf.cast(counts.example_weight, value.dtype)
    if kind == "sum":
        return global_sum(example_weight * value, counts.partial_values)
    weight = example_weight * tf.cast(counts.local_size, value.dtype)
    return global_mean(weight * value, weight, counts.size_of_all(value.dtype), counts.partial_values)


def _num_of_all(num_local: tf.Tensor, counts: BatchWeights) -> tf.Tensor | None:
    """Scale the number of loss values from the per-replica to the global batch; None if a size is unknown."""
    size = counts.size_of_all(num_local.dtype)
    if counts.local_size is None or size is None:
        return None
    return num_local / tf.cast(counts.local_size, num_local.dtype) * size


def _num_weighted(values: tf.Tensor, sample_weight: Any, mask: Any) -> tf.Tensor:
    """Return the number of loss values after weights and mask are broadcast to them.

    Keras multiplies values `[batch, 1]` by weights `[batch, steps]`, and divides by the number of products.
    """
    weights = keras_losses.apply_mask(sample_weight, mask, dtype=values.dtype, reduction="sum")
    if weights is None:
        return tf.size(values)
    values, weights = keras_losses.squeeze_or_expand_to_same_rank(values, tf.convert_to_tensor(weights))
    if values.shape[1:].is_fully_defined() and values.shape[1:] == weights.shape[1:]:
        return tf.size(values)
    return tf.reduce_prod(tf.broadcast_dynamic_shape(tf.shape(values), tf.shape(weights)))


def _values_per_entry(values: tf.Tensor, sample_weight: Any, mask: Any) -> tf.Tensor:
    """Return the number of weighted loss values per entry of a mask."""
    num_weighted = tf.cast(_num_weighted(values, sample_weight, mask), values.dtype)
    return tf.math.divide_no_nan(num_weighted, tf.cast(tf.size(mask), values.dtype))
