"""Reorder the rows of a batch, so that the first rows, which the study uses, differ.

    batch, sorted by length        rows that differ first
    a b c d e f g h                a b c d e f g h
    a b c d e f g h                a b c d e f - -
    a b c d e f g -                a b c d - - - -
    ...                            a b - - - - - -
    a b - - - - - -                ...

The two halves of the first four rows differ too, such as in their longest row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.data.batching.batches import join_batches, num_rows, take_rows

NUM_VARIED, _NUM_IN_HALVES = 8, 4
_MOST_ELEMENTS = 1 << 26  # larger tensors are not examined


def varied_first(batch: Any) -> Any:
    """Reorder a batch so that its first rows differ in padding, markers and lengths, by which losses are divided.

    The study uses the first rows. In a batch that is sorted by length they have no padding, and a mean over a mask
    would look like a mean over the batch.

    Args:
        batch: `(inputs, targets, sample_weight)` as far as given: structures of `tf.Tensor`, `tf.RaggedTensor`,
            `tf.SparseTensor` or None, `[rows, ...]` each.

    Returns:
        All rows in the new order; the batch itself if no rows differ.

    Example:
        >>> varied_first(tf.constant([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]])).numpy().tolist()
        [[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]]
    """
    count = int(num_rows(batch))
    inputs = batch[0] if isinstance(batch, tuple) else batch
    input_traits, all_traits = (
        [traits for leaf in tf.nest.flatten(part) if leaf is not None and (traits := _varying(_traits(leaf), count))]
        for part in (inputs, batch)
    )
    if not all_traits:
        return batch
    lengths = np.sum([traits[0] for traits in input_traits or all_traits], axis=0)
    chosen = _spread(np.stack([trait for traits in all_traits for trait in traits], 1), _by_score(lengths))
    order = [*chosen, *(row for row in range(count) if row not in chosen)]
    return batch if order == list(range(count)) else tf.nest.map_structure(lambda leaf: _in_order(leaf, order), batch)


def _varying(traits: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Return the traits in which rows differ, scaled to [0, 1]."""
    return [(trait - trait.min()) / np.ptp(trait) for trait in traits if len(trait) == count and np.ptp(trait) > 0]


def _by_score(score: np.ndarray) -> list[int]:
    """Return up to four rows with evenly spaced scores, from the lowest to the highest."""
    values, chosen = np.unique(score), list[int]()
    for number in range(min(_NUM_IN_HALVES, len(score))):
        value = values[round(number * (len(values) - 1) / (_NUM_IN_HALVES - 1))]
        rows = [row for row in np.flatnonzero(score == value).tolist() if row not in chosen]
        chosen += rows[:1]
    return chosen


def _traits(leaf: Any) -> list[np.ndarray]:
    """Return counts for each row: of stored values, or of zeros, of negative and of missing or largest values."""
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
    flags = [values == 0]
    if values.dtype.kind in "if":
        flags.append(values < 0)
    flags.append(np.isnan(values) if values.dtype.kind == "f" else values == values.max())
    return [np.count_nonzero(flag, axis=1).astype(np.float64) for flag in flags]


def _spread(traits: np.ndarray, chosen: list[int]) -> list[int]:
    """Add to the chosen rows, again and again, the row farthest from them, as long as it differs."""
    distances = np.min([np.abs(traits - traits[row]).sum(1) for row in chosen], axis=0)
    while len(chosen) < NUM_VARIED and distances.max() > 0:
        chosen = [*chosen, int(distances.argmax())]
        distances = np.minimum(distances, np.abs(traits - traits[chosen[-1]]).sum(1))
    return chosen


def _in_order(leaf: Any, order: list[int]) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return join_batches([take_rows(leaf, row, row + 1) for row in order])
    return None if leaf is None else tf.gather(leaf, order)
