"""The few rows that a model is studied on, in two parts of unequal sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpar import data

SIZES = (2, 3)  # rows of each part


class Part(NamedTuple):
    """Consecutive rows.

    Args:
        rows: The rows, `[size, ...]` each.
        start: The index of the first row.
        size: The number of rows.
    """

    rows: Any
    start: int
    size: int


def few_rows(batch: Any) -> Any:
    """Return five rows: the first two of a batch for the first part, the next two, one of them twice, for the second.

    Args:
        batch: Tensors in any structure, `[rows, ...]` each, or None.

    Example:
        >>> few_rows(tf.range(8)).numpy().tolist(), few_rows(tf.range(2)).numpy().tolist()
        ([0, 1, 2, 3, 2], [0, 0, 1, 1, 1])
    """
    size = min(4, int(data.num_rows(batch)))
    half = size // 2
    first, second = data.take_rows(batch, 0, max(1, half)), data.take_rows(batch, half, size)
    return data.join_batches([_repeated(rows, number) for rows, number in zip((first, second), SIZES, strict=True)])


def _repeated(rows: Any, number: int) -> Any:
    copies = [rows] * -(-number // int(data.num_rows(rows)))
    return data.take_rows(data.join_batches(copies) if len(copies) > 1 else rows, 0, number)


def parts_of(rows: Any) -> list[Part]:
    """Split the result of `few_rows` into its two parts.

    Example:
        >>> [part.rows.numpy().tolist() for part in parts_of(tf.range(5))]
        [[0, 1], [2, 3, 4]]
    """
    first, second = SIZES
    return [
        Part(data.take_rows(rows, 0, first), 0, first),
        Part(data.take_rows(rows, first, first + second), first, second),
    ]


def with_other_neighbours(rows: Any) -> Any:
    """Replace the rows of the second part by copies of those of the first.

    Example:
        >>> with_other_neighbours(tf.range(5)).numpy().tolist()
        [0, 1, 0, 1, 0]
    """
    return _repeated(data.take_rows(rows, 0, SIZES[0]), sum(SIZES))


def varied(inputs: Any) -> Any:
    """Vary five rows of a model's inputs, because the rows of a first batch may be all empty, or of one length.

    Floats become a little smaller, so that they stay indices of an Embedding. The first ragged row becomes the longest.
    If all rows are copies, such as one text, each gets its elements in another order.
    """
    return tf.nest.map_structure(lambda leaf: None if leaf is None else _varied(_rolled(leaf)), inputs)


def _rolled(tensor: Any) -> Any:
    """Give each row its elements in another order, if all rows are equal."""
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank < 2 or not _are_copies(tensor):
        return tensor
    return tf.concat([tf.roll(tensor[row : row + 1], row, -1) for row in range(sum(SIZES))], 0)


def _are_copies(tensor: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.equal(tensor, tensor[:1])))


def _varied(tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        longest = int(tf.argmax(tensor.row_lengths()))
        first = tf.concat([tensor[longest : longest + 1]] * 2 + [tensor[:1]], 1)
        tensor = tf.concat([first, tensor[1:]], 0)
        return tensor.with_flat_values(_varied(tensor.flat_values))
    if isinstance(tensor, tf.SparseTensor):
        return tensor.with_values(_varied(tensor.values))
    if not tensor.dtype.is_floating:
        return tensor
    factors = np.random.default_rng(0).uniform(0.8, 1.0, tensor.shape)
    return tensor * tf.cast(factors, tensor.dtype)
