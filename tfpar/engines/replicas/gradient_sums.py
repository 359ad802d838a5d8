"""Sums of dense and sparse gradients over all replicas, with the results of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.gradients.all_reduce import Sums, all_reduce_gradients
from tfpar.reduction.replicas import sum_on


class ReplicaGradients(NamedTuple):
    """The gradients of one replica, before they are summed.

    Args:
        values: Gradients: tensors, `tf.IndexedSlices` or None; a scalar loss may follow them.
        variables: Weights that they are gradients of.
        forward: All results of the forward pass, the loss first; empty if the gradients wait for all reads already.
        example_weight: Weight of an example in losses, a scalar.
        num_counted: Number of the replica's examples to count in metrics, an int scalar.
        number: Index of the update among those of the step.
        own_sums: Functions, by index of the gradient, that sum some gradients over all replicas in another way.
    """

    values: Sequence[Any]
    variables: Sequence[keras.Variable]
    forward: Any
    example_weight: tf.Tensor
    num_counted: tf.Tensor
    number: int = 0
    own_sums: Sums | None = None


def sum_gradients(
    gradients: ReplicaGradients,
    lookups: Sequence[indexed_slices.Lookups | None],
    pack_bytes: int | None,
    compression: str | None,
    owners: Sequence[int] = (),
) -> list[Any]:
    """Sum gradients over all replicas, in replica context.

    Args:
        gradients: Gradients of the calling replica.
        lookups: Lookups of each gradient; None to sum it as a dense gradient.
        pack_bytes: As for `tfpar.reduction.gradients.all_reduce.all_reduce_gradients`.
        compression: As for `tfpar.reduction.gradients.all_reduce.all_reduce_gradients`.
        owners: Replicas of this process that each sum one of the first gradients; empty to all-reduce all gradients.
    """
    counts = gradients.example_weight, gradients.num_counted
    sent: list[Any] = []
    others: dict[int, Callable[[], tf.Tensor]] = {}
    for index, (gradient, rows) in enumerate(zip(gradients.values, lookups, strict=True)):
        if gradients.own_sums and index in gradients.own_sums:
            others[len(sent)] = gradients.own_sums[index]
        dense = tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        pairs = zip(rows.rows, rows.kinds, strict=True) if rows else ()
        messages = [indexed_slices.to_send(*pair, *counts) for pair in pairs] or [dense]
        if index < len(owners) and gradient is not None:
            reduce = (functools.partial(sum_on, owners[index], message) for message in messages)
            others.update(enumerate(reduce, len(sent)))
        sent += messages
    sums = iter(all_reduce_gradients(sent, pack_bytes, compression, others))
    return [
        indexed_slices.join(
            [indexed_slices.summed(*pair, next(sums)) for pair in zip(rows.rows, rows.kinds, strict=True)],
            gradient.dense_shape,
        )
        if rows
        else next(sums)
        for gradient, rows in zip(gradients.values, lookups, strict=True)
    ]
