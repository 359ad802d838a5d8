"""Softmax cross-entropy over scores in pieces of the vocabulary, each computed again by chunks of rows.

Each device gives the maximum of each row, the sum of exponentials and the score of the label, from one walk over its
chunks. The first device joins them. The backward pass walks over the chunks once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.reduction import row_scores
from tfpar.reduction.row_scores import RowScores
from tfpar.reduction.vocabulary_losses import ClassPieces, at_columns, columns_in, in_vocabulary, subtract_in_place


def sparse_losses(
    labels: tf.Tensor, logits: ClassPieces, computed: Sequence[RowScores], valid: tf.Tensor | None = None
) -> tf.Tensor:
    """Return the cross-entropy of each position, as `vocabulary_losses.sparse_losses`.

    Args:
        labels: The class of each position, an integer tensor `[...]`.
        logits: ClassPieces `[..., size]`, which are not read.
        computed: How each piece is computed.
        valid: Whether a position counts, bool `[...]`; None for all. The others have no gradient.

    Returns:
        `[...]`, on the first device. A label outside of the vocabulary is an error on a CPU, and NaN on a GPU.
    """
    classes, indices, home = tf.reshape(tf.cast(labels, tf.int64), [-1]), range(len(computed)), logits.devices[0]
    with tf.device(home):
        is_valid = None if valid is None else tf.reshape(valid, [-1])
        weights = in_vocabulary(classes, sum(logits.sizes), logits.tensors[0].dtype, home)
    joined: list[tf.Tensor] = []  # the maximum and the sum of exponentials over all pieces

    def backward(index: int, upstream: tf.Tensor) -> list[tf.Tensor]:
        maximum, total = joined
        with tf.device(home):
            scale = upstream / total
            if is_valid is not None:
                scale = tf.where(is_valid, scale, tf.zeros_like(scale))
                upstream = tf.where(is_valid, upstream, tf.zeros_like(upstream))
        with tf.device(logits.devices[index]):
            columns, is_inside = columns_in(logits, index, classes)
            entries = tf.where(is_inside, upstream, tf.zeros_like(upstream))
            function = functools.partial(_gradient, tf.multiply if valid is None else tf.math.multiply_no_nan)
            arguments = [maximum, scale, columns, entries]
            return row_scores.gradients(computed[index], function, arguments, logits.sizes[index])

    found = [_of_piece(logits, computed[index], index, classes, backward) for index in indices]
    with tf.device(home):
        maxima, sums, targets, zeros = zip(*found, strict=True)
        maximum = tf.reduce_max(tf.stack(maxima), 0)
        total = tf.add_n([part * tf.exp(one - maximum) for one, part in zip(maxima, sums, strict=True)])
        joined.extend(map(tf.stop_gradient, (maximum, total)))
        # The columns of a label outside of the vocabulary are in no piece, and its weight is not a number.
        losses = weights * tf.math.log(total) - (tf.add_n(targets) - maximum)
        return tf.reshape(tf.add_n([tf.stop_gradient(losses), *zeros]), tf.shape(labels))


def _of_piece(
    logits: ClassPieces,
    computed: RowScores,
    index: int,
    classes: tf.Tensor,
    backward: Callable[[int, tf.Tensor], list[tf.Tensor]],
) -> tuple[tf.Tensor, ...]:
    """Return the maximum, the sum of exponentials and the score of the label of each row, and zeros.

    The gradient of the zeros is that of the losses.
    """

    @tf.custom_gradient
    def function(inputs: tf.Tensor, *weights: tf.Tensor) -> tuple[Any, Callable[..., list[tf.Tensor]]]:
        scores = computed._replace(inputs=inputs, weights=weights)
        columns = columns_in(logits, index, classes)
        dtypes = [logits.tensors[index].dtype] * 3
        found = row_scores.over_rows(scores, _statistics, columns, dtypes, logits.sizes[index])
        return (*found, tf.zeros_like(found[0])), lambda *upstream: backward(index, upstream[-1])

    with tf.device(logits.devices[index]):
        found: tuple[tf.Tensor, ...] = function(computed.inputs, *computed.weights)
        return found


def _statistics(scores: tf.Tensor, columns: tf.Tensor, is_inside: tf.Tensor) -> list[tf.Tensor]:
    """Return the maximum of each row, the sum of exponentials relative to it, and the score of the label or zero."""
    maximum = tf.reduce_max(scores, -1)
    shift = tf.where(tf.math.is_finite(maximum), maximum, tf.zeros_like(maximum))  # a piece may have no finite score
    total = tf.reduce_sum(tf.exp(scores - shift[:, None]), -1)
    return [maximum, total, at_columns(scores, columns, is_inside)]


def _gradient(
    product: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    scores: tf.Tensor,
    maximum: tf.Tensor,
    scale: tf.Tensor,
    columns: tf.Tensor,
    entries: tf.Tensor,
) -> tf.Tensor:
    """Return the gradient of the scores of some rows."""
    exponentials = tf.exp(scores - maximum[:, None])
    return subtract_in_place(product(exponentials, scale[:, None]), columns, entries)
