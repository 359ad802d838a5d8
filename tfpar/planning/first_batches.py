"""Read the first batches of training data: one to train all layouts on, and others to time the input pipeline."""

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
        first: A dataset of the first batch only, with the element spec of the whole dataset.
        wait_seconds: Median seconds to read a batch.
    """

    first: tf.data.Dataset
    wait_seconds: float


def read(dataset: Any) -> FirstBatches:
    """Read the first batches of training data.

    The hooks of a `keras.utils.PyDataset` are not called, so that a later `fit` has the order that it would have
    without a plan.

    Args:
        dataset: Training data, as for `Trainer.fit`.

    Raises:
        ValueError: If there is no batch, or the first one has no examples.

    Example:
        >>> batches = read(tf.data.Dataset.range(10).batch(4))
        >>> [batch.numpy().tolist() for batch in batches.first]
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
    # Concatenating no batches relaxes the shape: other batches may have another number of examples.
    only_first = tf.data.Dataset.from_tensors(first).concatenate(whole.take(0))
    return FirstBatches(only_first, statistics.median(seconds[1:] or seconds))  # the first wait includes the start


def _timed(dataset: tf.data.Dataset) -> tuple[Any, list[float]]:
    """Return the first batch, or None, and the seconds that each batch took to read."""
    first, seconds = None, list[float]()
    iterator = iter(data.without_autotuning(dataset))
    for index in range(1 + _BATCHES):
        began_seconds = time.perf_counter()
        upcoming = iterator.get_next_as_optional()
        if not upcoming.has_value():
            break
        seconds.append(time.perf_counter() - began_seconds)
        if index == 0:
            first = upcoming.get_value()
    return first, seconds


def _check_not_empty(batch: Any) -> None:
    first = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    if first is not None and first.shape[:1] == [0]:
        raise ValueError(
            "The planner measures steps on the first batch, which must hold at least one example, but it is empty. "
            "Check its source and filters."
        )
