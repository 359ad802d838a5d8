"""The data of a plan, read once: the first batch, the wait for those after it, and trainers on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar import data
from tfpar.planning.step_timing import TimedLoop
from tfpar.strategies import Strategy
from tfpar.trainer import Trainer

MakeTrainer = Callable[[Strategy], tuple[Trainer, Any]]

_BATCHES = 5


class GivenData(NamedTuple):
    """The data that all trainers of a plan are built from.

    Args:
        first: A dataset of the first batch alone, with the shapes and types of all batches.
        wait_seconds: The median seconds until the next batch is there.
        core_seconds: Seconds of processor time that a batch takes, on all cores together.
    """

    first: tf.data.Dataset
    wait_seconds: float
    core_seconds: float = 0.0


class ReadOnce:
    """The trainers of a plan, all with the data that the first of them read.

    Args:
        make_trainer: Returns a trainer under a strategy and its training data, as for `Trainer.fit`.
    """

    def __init__(self, make_trainer: MakeTrainer) -> None:
        self._make_trainer = make_trainer
        self._given: GivenData | None = None

    def __call__(self, strategy: Strategy) -> tuple[Trainer, GivenData]:
        """Return a trainer under a strategy, and the data.

        Raises:
            ValueError: As `read`.
        """
        trainer, dataset = self._make_trainer(strategy)
        if self._given is None:
            self._given = dataset if isinstance(dataset, GivenData) else read(dataset)
        return trainer, self._given


class Prepared(NamedTuple):
    """A trainer of a plan, with what its steps need.

    Args:
        trainer: The trainer, whose model is built.
        loop: Its steps.
        batch: The first batch.
        given: The data.
    """

    trainer: Trainer
    loop: TimedLoop
    batch: Any
    given: GivenData


def prepared(make_trainer: ReadOnce, strategy: Strategy) -> Prepared:
    """Return a trainer under a strategy with its steps, its first batch and its data.

    Args:
        make_trainer: The trainers of the plan.
        strategy: The strategy.

    Raises:
        ValueError: As `read`, or if the strategy cannot train the model.
    """
    trainer, given = make_trainer(strategy)
    batch = trainer.build(given.first)
    return Prepared(trainer, TimedLoop(trainer.model, strategy, batch), batch, given)


def read(dataset: Any) -> GivenData:
    """Read the first batches of training data.

    A generator is not read again, and no hook of a `keras.utils.PyDataset` is called: a later `fit` has the order
    that it would have without a plan.

    Args:
        dataset: Training data, as for `Trainer.fit`.

    Returns:
        The first batch, the wait for a batch, and the processor time of one.

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
        first, seconds, core_seconds = _timed(whole)
        if len(seconds) == 1:  # the start of the first pass is no wait for a batch
            _, again_seconds, core_seconds = _timed(whole)
            seconds += again_seconds
    finally:
        if isinstance(batches, data.PythonBatches):
            batches.stop()
    if not seconds:
        raise ValueError(data.EMPTY)
    _check_not_empty(first)
    # The empty dataset gives the shapes of all batches: another batch may have another number of examples.
    alone = tf.data.Dataset.from_tensors(first).concatenate(whole.take(0))
    *_, calls_core_seconds = _timed(tf.data.Dataset.from_tensors(first).repeat())
    return GivenData(alone, statistics.median(seconds[1:] or seconds), max(0.0, core_seconds - calls_core_seconds))


def _timed(dataset: tf.data.Dataset) -> tuple[Any, list[float], float]:
    """Read the first batches.

    Returns:
        The first batch, None if there is none; the seconds until each of the batches was there; and the mean of the
        processor seconds of those after the first, if there are any.
    """
    first, seconds, core_seconds = None, list[float](), list[float]()
    iterator = iter(data.without_autotuning(dataset))
    for number in range(1 + _BATCHES):
        began_seconds, began_core_seconds = time.perf_counter(), time.process_time()
        upcoming = iterator.get_next_as_optional()
        if not upcoming.has_value():
            break
        seconds.append(time.perf_counter() - began_seconds)
        core_seconds.append(time.process_time() - began_core_seconds)
        if number == 0:
            first = upcoming.get_value()
    return first, seconds, statistics.mean(core_seconds[1:] or core_seconds or [0.0])


def _check_not_empty(batch: Any) -> None:
    first = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    if first is not None and first.shape[:1] == [0]:
        raise ValueError(
            "The planner measures steps on the first batch, which must hold at least one example, and it is empty. "
            "Look at its source and filters."
        )
