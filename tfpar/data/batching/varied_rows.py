"""The rows of a batch in another order: rows that differ first, for the study of a few rows.

    batch, sorted by length        rows that differ first
    a b c d e f g h                a b c d e f g h
    a b c d e f g h                a b c d e f - -
    a b c d e f g -                a b c d - - - -
    ...                            a b - - - - - -
    a b - - - - - -                ...

The halves of the first four rows differ too, such as in their longest row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.data.batching.batches import join_batches, num_rows, take_rows

NUM_VARIED, _NUM_IN_HALVES = 8, 4
_MOST_ELEMENTS = 1 << 26  # of a tensor that is looked at


def varied_first(batch: Any) -> Any:
    """Return a batch whose first rows differ in what divides losses: padding, markers, lengths.

    A study before the first step takes the first rows. In a batch that is sorted by length these have no padding, and a
    mean over a mask would look like a mean over the batch.

    Args:
        batch: `(inputs, targets, sample_weight)` as far as given: structures of `tf.Tensor`, `tf.RaggedTensor`,
            `tf.SparseTensor` or None, `[rows, ...]` each.

    Returns:
        All rows; the batch itself if no row differs.

    Example:
        >>> varied_first(tf.constant([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]])).numpy().tolist()
        [[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]]
    """
    count = int(num_rows(batch))
    inputs = batch[0] if isinstance(batch, tuple) else batch
    of_inputs, of_all = (
        [found for leaf in tf.nest.flatten(one) if leaf is not None and (found := _varying(_traits(leaf), count))]
        for one in (inputs, batch)
    )
    if not of_all:
        return batch
    lengths = np.sum([traits[0] for traits in of_inputs or of_all], axis=0)
    chosen = _spread(np.stack([column for traits in of_all for column in traits], 1), _by_score(lengths))
    order = [*chosen, *(row for row in range(count) if row not in chosen)]
    return batch if order == list(range(count)) else tf.nest.map_structure(lambda leaf: _in_order(leaf, order), batch)


def _varying(traits: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Return the traits in which rows differ, from 0 to 1 each."""
    return [(one - one.min()) / np.ptp(one) for one in traits if len(one) == count and np.ptp(one) > 0]


def _by_score(score: np.ndarray) -> list[int]:
    """Return four different rows, or two, in the order of a score: of the least, of the greatest, of two between."""
    values, chosen = np.unique(score), list[int]()
    for number in range(min(_NUM_IN_HALVES, len(score))):
        wanted = values[round(number * (len(values) - 1) / (_NUM_IN_HALVES - 1))]
        rows = [row for row in np.flatnonzero(score == wanted).tolist() if row not in chosen]
        chosen += rows[:1]
    return chosen


def _traits(leaf: Any) -> list[np.ndarray]:
    """Return numbers of each row: of its values, zeros, negative and missing ones, and of those of the last class."""
    if isinstance(leaf, tf.RaggedTensor):
        return [np.asarray(leaf.row_lengths(), np.float64)]
    if isinstance(leaf, tf.SparseTensor):
        return [np.bincount(leaf.indices[:, 0].numpy(), minlength=int(leaf.dense_shape[0])).astype(np.float64)]
    if leaf.dtype == tf.string or leaf.dtype.is_complex or int(tf.size(leaf)) > _MOST_ELEMENTS:
        return []
    values = np.asarray(tf.cast(leaf, tf.float32) if leaf.dtype == tf.bfloat16 else leaf)
    values = values.reshape(len(values), -1)
    if not values.size:
        return []
    found = [values == 0]
    if values.dtype.kind in "if":
        found.append(values < 0)
    found.append(np.isnan(values) if values.dtype.kind == "f" else values == values.max())
    return [np.count_nonzero(one, axis=1).astype(np.float64) for one in found]


def _spread(traits: np.ndarray, chosen: list[int]) -> list[int]:
    """Return some rows, then always the one that is farthest from those before, as long as it differs."""
    distances = np.min([np.abs(traits - traits[row]).sum(1) for row in chosen], axis=0)
    while len(chosen) < NUM_VARIED and distances.max() > 0:
        chosen = [*chosen, int(distances.argmax())]
        distances = np.minimum(distances, np.abs(traits - traits[chosen[-1]]).sum(1))
    return chosen


def _in_order(leaf: Any, order: list[int]) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return join_batches([take_rows(leaf, row, row + 1) for row in order])
    return None if leaf is None else tf.gather(leaf, order)
