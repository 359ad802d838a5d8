"""Losses and gradients reduced over replicas as (sum, weight) pairs and divided once, globally.

    replica 0   loss sum 3.0, weight 4 ─┐                        ┌─ value 5.0 / 7, gradient of 3.0 / 7
                                        ├─ 5.0 over 7 examples ──┤
    replica 1   loss sum 2.0, weight 3 ─┘                        └─ value 5.0 / 7, gradient of 2.0 / 7

The value that a replica sees is the global loss, so everything that Keras does with it (loss weights, the sum over
outputs, the trackers behind the logs) is what one device would do. The gradient that it sees is its own part, so the
sum over replicas is the gradient of the global loss: no division by the number of replicas, no local mean, nothing
that a ragged part could tilt.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import _compat

Kind = Literal["mean", "sum"]


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


def reduce_loss(
    values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any, share: float | tf.Tensor = 1.0
) -> tf.Tensor:
    """Reduce one loss over the global batch, with the meaning that Keras gives to `reduction` on one device.

    Args:
        values: Losses `[batch, ...]` of this replica's examples.
        sample_weight: `[batch, ...]` or None.
        mask: `[batch, ...]` or None; what it leaves out counts in no divisor.
        reduction: A reduction of `keras.losses.Loss`.
        dtype: The dtype in which to compute.
        share: What each of this replica's examples counts; less than 1 where other replicas have them too.

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
    share = tf.cast(share, values.dtype)
    total = share * _compat.reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype)
    if reduction == "sum":
        return global_sum(total)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = _compat.apply_mask(sample_weight, mask, dtype=values.dtype, reduction="sum")
        _, weights = _compat.squeeze_or_expand_to_same_rank(values, tf.cast(weights, values.dtype))
        return global_mean(total, share * tf.reduce_sum(weights))
    return global_mean(total, share * _num_valid(values, mask))


def _num_valid(values: tf.Tensor, mask: Any) -> tf.Tensor:
    """Count the losses that count: all of them, or those the mask keeps (times the losses under one mask entry)."""
    count = tf.cast(tf.size(values), values.dtype)
    if mask is None:
        return count
    mask = tf.cast(mask, values.dtype)
    values_per_entry = tf.math.divide_no_nan(count, tf.cast(tf.size(mask), values.dtype))
    return tf.reduce_sum(mask) * values_per_entry


class Division:
    """How the losses of one model divide over replicas; found out before the first step.

    Keras' own losses are divided by their true weights, summed over the replicas. What a layer adds with `add_loss`,
    and what an overridden `compute_loss` returns, says nothing about how it was averaged, and on one device it makes
    no difference. So those are computed on two parts of a batch and on both together: a sum adds up, a mean averages,
    anything else cannot be divided.

    Args:
        model: A built and compiled model.
        batch: Its first global batch, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.

    Raises:
        ValueError: If a loss cannot be divided over replicas.
    """

    def __init__(self, model: keras.Model, batch: Any) -> None:
        check_divisible(model)
        self._own_loss: Kind | None = None
        self._added_losses: list[Kind] = []
        first, rest, both = _parts(batch)
        if _compat.overridden(model, "compute_loss"):
            losses = [[_own_loss(model, part)] for part in (first, rest, both)]
            (self._own_loss,) = _kinds(losses, _num_examples(rest), f"What {type(model).__name__}.compute_loss returns")
        elif _added_losses(model, first):
            losses = [_added_losses(model, part) for part in (first, rest, both)]
            self._added_losses = _kinds(losses, _num_examples(rest), f"A loss added with add_loss to {model.name!r}")

    @contextlib.contextmanager
    def over_replicas(self, num_examples: Sequence[tf.Tensor], share: tf.Tensor) -> Iterator[None]:
        """Reduce every loss that Keras computes inside this context over all replicas.

        Args:
            num_examples: The number of examples of each local replica, int scalars, at least 1.
            share: Scalar, what each of them counts: 1, or less where every replica has all examples.
        """
        added: dict[int, list[Any]] = collections.defaultdict(list)

        def reduce_added_loss(model: keras.Model, loss: Any) -> tf.Tensor:
            replica = _replica_id()
            value = _compat.aggregate_added_loss(model, loss)
            position = next((index for index, other in enumerate(added[replica]) if other is loss), None)
            # A weight's penalty is not in the list: it is the same on every replica, and so a mean.
            kind = "mean" if position is None else self._added_losses[position]
            return _reduce_kind(kind, value, num_examples[replica], share)

        def reduce_own_loss(loss: tf.Tensor) -> tf.Tensor:
            return _reduce_kind(self._own_loss, loss, num_examples[_replica_id()], share)

        with _compat.collect_added_losses(lambda: added[_replica_id()]):
            if self._own_loss is None:
                with _compat.loss_reduction(functools.partial(reduce_loss, share=share), reduce_added_loss):
                    yield
            else:
                with _compat.local_losses(), _compat.compute_loss_then(reduce_own_loss):
                    yield


def _reduce_kind(kind: Kind | None, value: tf.Tensor, num_examples: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    share = tf.cast(share, value.dtype)
    if kind == "sum":
        return global_sum(share * value)
    weight = share * tf.cast(num_examples, value.dtype)
    return global_mean(weight * value, weight)


def check_divisible(model: keras.Model) -> None:
    """Refuse losses whose part over some examples cannot be told from outside.

    Raises:
        ValueError: If a loss object reduces in a `__call__` of its own, or compares the examples of a batch, or if
            `compute_loss` is overridden with several losses.
    """
    losses = _compat.flat_losses(model)
    for loss in losses:
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
    if _compat.overridden(model, "compute_loss") and len(losses) > 1:
        raise ValueError(
            f"Under several replicas a model that overrides compute_loss can be compiled with one loss, and "
            f"{type(model).__name__} has {len(losses)}. Leave compute_loss to Keras, or train on SingleDevice()."
        )


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """Return one example, up to three others (the same if there are none), and all of them."""
    first = tf.nest.map_structure(lambda tensor: tensor[:1], batch)
    rest = tf.nest.map_structure(lambda tensor: tf.concat([tensor[1:3], tensor[:1]], 0), batch)
    return first, rest, tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), first, rest)


def _num_examples(batch: Any) -> float:
    return float(tf.shape(keras.tree.flatten(batch)[0])[0])


def _added_losses(model: keras.Model, batch: Any) -> list[float]:
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    added: list[Any] = []
    with _compat.collect_added_losses(lambda: added):
        _compat.call_model(model, inputs, training=False)
    return [float(tf.reduce_sum(loss)) for loss in added]


def _own_loss(model: keras.Model, batch: Any) -> float:
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = _compat.call_model(model, inputs, training=False)
    return float(_compat.compute_loss(model, inputs, targets, outputs, weights, training=False))


def _kinds(losses: list[list[float]], num_rest: float, what: str) -> list[Kind]:
    """Classify each loss by its values on one example, on `num_rest` examples, and on both together."""
    kinds: list[Kind] = []
    for one, others, both in zip(*losses, strict=True):
        if _close((one + num_rest * others) / (1 + num_rest), both):
            kinds.append("mean")
        elif _close(one + others, both):
            kinds.append("sum")
        else:
            raise ValueError(
                f"{what} must be a sum or a mean over the batch to be divided over replicas, received {one:.6g} and "
                f"{others:.6g} on two parts of a batch and {both:.6g} on both. Let it sum or average over the "
                f"examples, or train on SingleDevice()."
            )
    return kinds


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-3 * max(abs(value), abs(expected), 1e-12)


def all_reduce_gradients(gradients: Sequence[Any], pack_bytes: int | None = None) -> list[Any]:
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
        if pack_bytes is None or isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
            packs.append([index])
            dtype = None  # travels alone: nothing may join its pack
            continue
        size_bytes = gradient.shape.num_elements() * gradient.dtype.size
        if gradient.dtype == dtype and used_bytes + size_bytes <= pack_bytes:
            packs[-1].append(index)
            used_bytes += size_bytes
        else:
            packs.append([index])
            used_bytes, dtype = size_bytes, gradient.dtype
    return packs


def _all_reduce_sum(value: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(value))


def _replica_id() -> int:
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
