"""Sums over all replicas of dense gradients and of embedding rows, with the result of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction import indexed_slices
from tfpar.reduction.gradients import Sums, all_reduce_gradients
from tfpar.reduction.replicas import sum_on


def sum_gradients(
    gradients: Sequence[Any],
    found: indexed_slices.LookupKinds | None,
    example_weight: tf.Tensor,
    num_counted: tf.Tensor,
    pack_bytes: int | None,
    compression: str | None,
    own_sums: Sums | None = None,
    owners: Sequence[int] = (),
) -> list[Any]:
    """Sum gradients over all replicas; called in replica context.

    Args:
        gradients: The gradients of the calling replica: tensors, `tf.IndexedSlices` or None.
        found: The kinds of the lookups of each gradient, from `lookup_trials.find_lookup_kinds`; None without a trial.
        example_weight: The weight of an example in losses, a scalar.
        num_counted: The number of its examples to count in metrics, an int scalar.
        pack_bytes: As for `tfpar.reduction.gradients.all_reduce_gradients`.
        compression: As for `tfpar.reduction.gradients.all_reduce_gradients`.
        own_sums: As for `tfpar.reduction.gradients.all_reduce_gradients`.
        owners: For the first gradients, the replica of this process on whose device each is summed; none to all-reduce.

    Raises:
        ValueError: If a gradient has lookups that the trial did not find.
    """
    kinds, failure = found or indexed_slices.LookupKinds([])
    lookups = [
        lookups_of(gradient, kinds[index] if index < len(kinds) else [], failure)
        for index, gradient in enumerate(gradients)
    ]
    sent: list[Any] = []
    others: dict[int, Callable[[], tf.Tensor]] = {}
    for index, (gradient, rows) in enumerate(zip(gradients, lookups, strict=True)):
        if own_sums and index in own_sums:
            others[len(sent)] = own_sums[index]
        messages = [indexed_slices.to_send(*one, example_weight, num_counted) for one in rows] or [gradient]
        if index < len(owners) and gradient is not None:
            reduce = (functools.partial(sum_on, owners[index], message) for message in messages)
            others.update(enumerate(reduce, len(sent)))
        sent += messages
    sums = iter(all_reduce_gradients(sent, pack_bytes, compression, others))
    return [
        indexed_slices.join([indexed_slices.summed(*one, next(sums)) for one in rows], gradient.dense_shape)
        if rows
        else next(sums)
        for gradient, rows in zip(gradients, lookups, strict=True)
    ]


def lookups_of(
    gradient: Any, kinds: Sequence[indexed_slices.Kind], failure: str
) -> list[tuple[indexed_slices.RowSlices, indexed_slices.Kind]]:
    """Return the lookups of indexed slices with their kinds; none for another gradient.

    Args:
        gradient: A gradient of one weight.
        kinds: The kinds of its lookups, from a trial.
        failure: Why the trial failed; empty if it did not.

    Raises:
        ValueError: If it has lookups that the trial did not find.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return []
    rows = indexed_slices.split_lookups(gradient)
    if len(rows) != len(kinds) and not (tf.executing_eagerly() and kinds):
        raise ValueError(
            "With several replicas, a model with lookups must also train on a batch of its first four examples, "
            f"received rows of shape {gradient.values.shape[1:]} from a lookup that is missing there"
            f"{failure and f', because the model failed with {failure}'}. Leave the number of examples open in every "
            "layer, or train on SingleDevice()."
        )
    return list(zip(rows, kinds, strict=False))
