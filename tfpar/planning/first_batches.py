"""The first batches of training data: the one that all layouts of a plan train on, and the wait for the others."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar import data

_BATCHES = 5


class FirstBatches(NamedTuple):
    """The data of a plan.

    Args:
        first: A dataset of the first batch alone, with the shapes and types of all batches.
        wait_seconds: The median seconds until the next batch is there.
    """

    first: tf.data.Dataset
    wait_seconds: float


def read(dataset: Any) -> FirstBatches:
    """Read the first batches of training data.

    A generator is not read again, and no hook of a `keras.utils.PyDataset` is called: a later `fit` has the order
    that it would have without a plan.

    Args:
        dataset: Training data, as for `Trainer.fit`.

    Raises:
        ValueError: If there is no batch, or the first one has no examples.

    Example:
        >>> given = read(tf.data.Dataset.range(10).batch(4))
        >>> [batch.numpy().tolist() for batch in given.first]
        [[0, 1, 2, 3]]
    """
    batches = data.as_dataset(dataset)
    whole = data.global_batches(batches)
    try:
        first, seconds = _timed(whole)
    finally:
        if isinstance(batches, data.PythonBatches):
            batches.stop()
    if not seconds:
        raise ValueError(data.EMPTY)
    _check_not_empty(first)
    # The empty dataset gives the shapes of all batches: another batch may have another number of examples.
    alone = tf.data.Dataset.from_tensors(first).concatenate(whole.take(0))
    return FirstBatches(alone, statistics.median(seconds[1:] or seconds))  # the first wait is for the start


def _timed(dataset: tf.data.Dataset) -> tuple[Any, list[float]]:
    """Return the first batch, None if there is none, and the seconds until each of some batches was there."""
    first, seconds = None, list[float]()
    iterator = iter(data.without_autotuning(dataset))
    for number in range(1 + _BATCHES):
        began_seconds = time.perf_counter()
        upcoming = iterator.get_next_as_optional()
        if not upcoming.has_value():
            break
        seconds.append(time.perf_counter() - began_seconds)
        if number == 0:
            first = upcoming.get_value()
    return first, seconds


def _check_not_empty(batch: Any) -> None:
    first = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    if first is not None and first.shape[:1] == [0]:
        raise ValueError(
            "The planner measures steps on the first batch, which must hold at least one example, and it is empty. "
            "Look at its source and filters."
        )
