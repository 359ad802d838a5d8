"""Losses and gradients reduced over replicas as (sum, weight) pairs and divided once, globally.

    replica 0   loss sum 3.0, weight 4 ─┐                        ┌─ value 5.0 / 7, gradient of 3.0 / 7
                                        ├─ 5.0 over 7 examples ──┤
    replica 1   loss sum 2.0, weight 3 ─┘                        └─ value 5.0 / 7, gradient of 2.0 / 7

The value that a replica sees is the global loss, so everything that Keras does with it (loss weights, the sum over
outputs, the trackers behind the logs) is what one device would do. The gradient that it sees is its own part, so the
sum over replicas is the gradient of the global loss: no division by the number of replicas, no local mean, nothing
that a ragged or empty part could tilt.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import _compat

AddedLoss = Literal["mean", "sum"]


def global_mean(total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Divide the sum over all replicas of `total` by that of `weight`; zero where the weight is zero.

    Args:
        total: Scalar, this replica's weighted sum.
        weight: Scalar, what this replica adds to the divisor. No gradient flows through it.

    Returns:
        Scalar: the global mean as value, this replica's part of it as gradient.
    """
    part = tf.math.divide_no_nan(total, _all_reduce_sum(weight))
    return part + (_all_reduce_sum(part) - tf.stop_gradient(part))


def global_sum(total: tf.Tensor) -> tf.Tensor:
    """Sum over all replicas as value, this replica's part as gradient.

    Args:
        total: Scalar, this replica's sum.
    """
    return total + (_all_reduce_sum(total) - tf.stop_gradient(total))


def reduce_loss(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
    """Reduce one loss over the global batch, with the meaning that Keras gives to `reduction` on one device.

    Args:
        values: Losses `[batch, ...]` of this replica's examples.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None; what it leaves out counts in no divisor.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype in which to compute.

    Returns:
        Scalar loss over the global batch.

    Raises:
        ValueError: If the loss is already a scalar or has no reduction, so that its examples cannot be told apart.
    """
    values = tf.convert_to_tensor(values, dtype=dtype)
    if values.shape.rank == 0:
        raise ValueError(
            "Under several replicas a loss must return one value per example, and this one returned a scalar: it "
            "reduces over the batch itself. Reduce over the last axis only, and let Keras average over the batch."
        )
    if reduction in (None, "none"):
        raise ValueError(
            "Under several replicas a loss needs a reduction, received reduction=None. Use 'sum_over_batch_size', "
            "'sum', 'mean' or 'mean_with_sample_weight'."
        )
    total = _compat.reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype)
    if reduction == "sum":
        return global_sum(total)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = _compat.apply_mask(sample_weight, mask, dtype=values.dtype, reduction="sum")
        _, weights = _compat.squeeze_or_expand_to_same_rank(values, tf.cast(weights, values.dtype))
        return global_mean(total, tf.reduce_sum(weights))
    return global_mean(total, _num_valid(values, mask))


def _num_valid(values: tf.Tensor, mask: Any) -> tf.Tensor:
    """Count the losses that count: all of them, or those the mask keeps (times the losses under one mask entry)."""
    count = tf.cast(tf.size(values), values.dtype)
    if mask is None:
        return count
    mask = tf.cast(mask, values.dtype)
    values_per_entry = tf.math.divide_no_nan(count, tf.cast(tf.size(mask), values.dtype))
    return tf.reduce_sum(mask) * values_per_entry


@contextlib.contextmanager
def over_replicas(num_examples: Sequence[tf.Tensor], added_losses: Sequence[AddedLoss]) -> Iterator[None]:
    """Reduce every loss that Keras computes inside this context over all replicas.

    Args:
        num_examples: The number of examples of each local replica, int scalars.
        added_losses: For each loss that the model's layers add, in the order of the calls, whether it is a mean or a
            sum over the batch (see `classify_added_losses`).
    """
    added: dict[int, list[Any]] = collections.defaultdict(list)

    def reduce_added_loss(model: keras.Model, loss: Any) -> tf.Tensor:
        replica = _replica_id()
        value = _compat.aggregate_added_loss(model, loss)
        position = next((index for index, other in enumerate(added[replica]) if other is loss), None)
        if position is not None and added_losses[position] == "sum":
            return global_sum(value)
        # A mean, or the same on every replica (a weight's penalty): weighted with the examples of the replica, so
        # that a replica without examples, whose mean is not a number, has no part in it.
        examples = tf.cast(num_examples[replica], value.dtype)
        return global_mean(tf.where(examples > 0, value * examples, tf.zeros_like(value)), examples)

    with (
        _compat.loss_reduction(reduce_loss, reduce_added_loss),
        _compat.collect_added_losses(lambda: added[_replica_id()]),
    ):
        yield


def check_divisible(model: keras.Model) -> None:
    """Refuse losses whose part over some examples cannot be told from outside.

    Raises:
        ValueError: If a loss object reduces in a `__call__` of its own, or compares the examples of a batch.
    """
    for loss in _compat.flat_losses(model):
        if isinstance(loss, keras.losses.Circle):
            raise ValueError(
                "keras.losses.Circle compares all examples of a batch, and a replica sees only its part. "
                "Train on SingleDevice()."
            )
        if isinstance(loss, keras.losses.Loss) and type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                f"Under several replicas a loss must leave the average over the batch to Keras, and "
                f"{type(loss).__name__} has a __call__ of its own. Override `call` and return one value per example."
            )


def classify_added_losses(model: keras.Model, inputs: Any) -> list[AddedLoss]:
    """Find out whether each loss that layers add with `add_loss` is a mean or a sum over the batch.

    Keras does not say which, and on one device it makes no difference. Over replicas it does, so the model is called
    on two parts of a batch and on both together: a sum adds up, a mean averages, anything else cannot be divided.

    Args:
        model: A built model.
        inputs: Its inputs, `[batch, ...]` each, at least one example.

    Returns:
        One entry for each added loss, in the order of the calls.

    Raises:
        ValueError: If a loss is neither.
    """
    first = tf.nest.map_structure(lambda tensor: tensor[:1], inputs)
    if not _added_losses(model, first):
        return []
    rest = tf.nest.map_structure(lambda tensor: tf.concat([tensor[1:3], tensor[:1]], 0), inputs)
    both = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), first, rest)
    num_rest = float(tf.shape(tf.nest.flatten(rest)[0])[0])
    kinds: list[AddedLoss] = []
    for index, (one, other, whole) in enumerate(
        zip(*(_added_losses(model, part) for part in (first, rest, both)), strict=True)
    ):
        if _close((one + num_rest * other) / (1 + num_rest), whole):
            kinds.append("mean")
        elif _close(one + other, whole):
            kinds.append("sum")
        else:
            raise ValueError(
                f"A loss added with add_loss must be a sum or a mean over the batch to be divided over replicas; "
                f"number {index} of {model.name!r} is {one:.6g} and {other:.6g} on two parts of a batch and "
                f"{whole:.6g} on both. Add its sum or mean over the examples, or train on SingleDevice()."
            )
    return kinds


def _added_losses(model: keras.Model, inputs: Any) -> list[float]:
    added: list[Any] = []
    with _compat.collect_added_losses(lambda: added):
        _compat.call_model(model, inputs, training=False)
    return [float(tf.reduce_sum(loss)) for loss in added]


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-3 * max(abs(value), abs(expected), 1e-12)


def all_reduce_gradients(
    gradients: Sequence[Any], pack_bytes: int | None = None
) -> list[Any]:
    """Sum each gradient over all replicas; a `None` stays one.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of this replica, one a variable.
        pack_bytes: Dense gradients are concatenated until a pack holds this many bytes, so that few large messages
            travel; None sends each by itself.

    Returns:
        The sums, in the order of `gradients`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    packs = _packs(gradients, present, pack_bytes)
    messages = [
        gradients[pack[0]] if len(pack) == 1 else tf.concat([tf.reshape(gradients[i], [-1]) for i in pack], 0)
        for pack in packs
    ]
    sums = list(gradients)
    reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, messages) if messages else []
    for pack, message in zip(packs, reduced, strict=True):
        if len(pack) == 1:
            sums[pack[0]] = message
            continue
        pieces = tf.split(message, [gradients[i].shape.num_elements() for i in pack])
        for i, piece in zip(pack, pieces, strict=True):
            sums[i] = tf.reshape(piece, gradients[i].shape)
    return sums


def _packs(gradients: Sequence[Any], present: Sequence[int], pack_bytes: int | None) -> list[list[int]]:
    """Group consecutive dense gradients of one dtype until a group would exceed `pack_bytes`."""
    packs: list[list[int]] = []
    used_bytes, dtype = 0, None
    for index in present:
        gradient = gradients[index]
        elements = None if isinstance(gradient, tf.IndexedSlices) else gradient.shape.num_elements()
        size_bytes = None if elements is None else elements * gradient.dtype.size
        fits = pack_bytes is not None and size_bytes is not None and used_bytes + size_bytes <= pack_bytes
        if packs and fits and gradient.dtype == dtype:
            packs[-1].append(index)
            used_bytes += size_bytes
        else:
            packs.append([index])
            # A gradient that is no dense tensor of known shape travels alone: nothing may join its pack.
            used_bytes, dtype = (size_bytes, gradient.dtype) if size_bytes is not None else (0, None)
    return packs


def _all_reduce_sum(value: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(value))


def _replica_id() -> int:
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
