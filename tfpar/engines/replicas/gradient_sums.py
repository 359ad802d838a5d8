"""Sums over all replicas of dense gradients and of embedding rows, with the result of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.gradients.all_reduce import Sums, all_reduce_gradients
from tfpar.reduction.replicas import sum_on


def sum_gradients(
    gradients: Sequence[Any],
    lookups: Sequence[indexed_slices.Lookups | None],
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
        lookups: The lookups of each gradient; None for one that is summed as a dense one.
        example_weight: The weight of an example in losses, a scalar.
        num_counted: The number of its examples to count in metrics, an int scalar.
        pack_bytes: As for `tfpar.reduction.gradients.all_reduce.all_reduce_gradients`.
        compression: As for `tfpar.reduction.gradients.all_reduce.all_reduce_gradients`.
        own_sums: As for `tfpar.reduction.gradients.all_reduce.all_reduce_gradients`.
        owners: For the first gradients, the replica of this process on whose device each is summed; none to all-reduce.
    """
    sent: list[Any] = []
    others: dict[int, Callable[[], tf.Tensor]] = {}
    for index, (gradient, found) in enumerate(zip(gradients, lookups, strict=True)):
        if own_sums and index in own_sums:
            others[len(sent)] = own_sums[index]
        dense = tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        pairs = zip(found.rows, found.kinds, strict=True) if found else ()
        messages = [indexed_slices.to_send(*pair, example_weight, num_counted) for pair in pairs] or [dense]
        if index < len(owners) and gradient is not None:
            reduce = (functools.partial(sum_on, owners[index], message) for message in messages)
            others.update(enumerate(reduce, len(sent)))
        sent += messages
    sums = iter(all_reduce_gradients(sent, pack_bytes, compression, others))
    return [
        indexed_slices.join(
            [indexed_slices.summed(*pair, next(sums)) for pair in zip(found.rows, found.kinds, strict=True)],
            gradient.dense_shape,
        )
        if found
        else next(sums)
        for gradient, found in zip(gradients, lookups, strict=True)
    ]
