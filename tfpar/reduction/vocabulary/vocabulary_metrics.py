"""Metrics over scores that are sharded by class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar.reduction.vocabulary.vocabulary_losses import ClassShards, at_columns, columns_in


def argmax(values: ClassShards, find: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return the class with the largest value at each position, `[...]`, on the first device. Ties go to the first.

    Args:
        values: Shards `[..., size]`.
        find: Returns the index of the largest value along the last axis of a tensor.
    """
    rows, offsets = values.rows(), [sum(values.sizes[:index]) for index in range(len(values.tensors))]
    pairs = [rows.at(index, lambda shard: _largest(shard, find)) for index in range(len(values.tensors))]
    with tf.device(values.devices[0]):
        best = find(tf.stack([largest for _, largest in pairs], -1))
        classes = tf.stack([column + offset for (column, _), offset in zip(pairs, offsets, strict=True)], -1)
        winners = tf.gather(classes, best, axis=-1, batch_dims=1)
        return tf.ensure_shape(tf.reshape(winners, tf.shape(values.tensors[0])[:-1]), values.tensors[0].shape[:-1])


def _largest(shard: tf.Tensor, find: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the index of the largest value along the last axis, and the value.

    Keras 3.15 orders -0.0 before 0.0, for which it copies its argument. That matters if the largest value is zero.
    """
    maximum = tf.reduce_max(shard, -1)
    column = tf.cond(
        tf.reduce_any(tf.equal(maximum, 0)),
        lambda: find(shard),
        lambda: tf.argmax(shard, -1, output_type=tf.int32),
    )
    column = tf.ensure_shape(column, maximum.shape)
    return column, tf.gather(shard, column, axis=-1, batch_dims=column.shape.rank)


def in_top_k(labels: tf.Tensor, values: ClassShards, k: Any) -> tf.Tensor:
    """Return whether fewer than `k` classes have larger values than the label, as `tf.math.in_top_k`.

    Args:
        labels: The class of each position, an integer tensor `[positions]`.
        values: ClassShards `[positions, size]`.
        k: The number of classes, an integer or a scalar.

    Returns:
        bool `[positions]`, on the first device. False for labels that are no class, and where a value is not finite.
    """
    classes, indices = tf.cast(labels, tf.int64), range(len(values.tensors))
    columns = [columns_in(values, i, classes) for i in indices]
    scores = [
        values.at(i, functools.partial(at_columns, columns=of_piece[0], is_inside=of_piece[1]))
        for i, of_piece in enumerate(columns)
    ]
    with tf.device(values.devices[0]):
        chosen = tf.add_n(scores)

    def ranked(shard: tf.Tensor) -> list[tf.Tensor]:
        larger = tf.math.count_nonzero(shard > chosen[:, None], -1, dtype=tf.int64)
        # A finite sum of absolute values could overflow.
        return [larger, tf.reduce_all(tf.math.is_finite(shard), -1)]

    ranks = [values.at(i, ranked) for i in indices]
    with tf.device(values.devices[0]):
        is_class = (classes >= 0) & (classes < sum(values.sizes))
        larger, finite = zip(*ranks, strict=True)
        return is_class & tf.reduce_all(tf.stack(finite), 0) & (tf.add_n(larger) < tf.cast(k, tf.int64))
