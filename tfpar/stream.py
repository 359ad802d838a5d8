"""Passes over a dataset: what comes next, and where in the data a run stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar import data

EMPTY = "A dataset must yield at least one batch, and this one is empty. Look at its source, filters and splits."


class Stream:
    """The batches of one dataset, epoch after epoch, with a position that can be saved and restored.

    A pass is one iterator. An epoch is one pass, unless a number of steps is given: then epochs follow one another
    within a pass, and a new pass begins where one ends.

    Args:
        dataset: What `Strategy.distribute` returned.
        steps_per_epoch: Steps an epoch; None for a whole pass.
        has_more: Says whether there is an upcoming element to train on; None asks the element itself.
        begun: A stream of the same dataset of which nothing was taken yet; this one goes on with its first pass.

    Raises:
        ValueError: If the dataset is empty.

    Example:
        >>> stream = Stream(tf.data.Dataset.range(3))
        >>> stream.steps_per_epoch
        3
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        steps_per_epoch: int | None = None,
        has_more: Callable[[tf.experimental.Optional], tf.Tensor] | None = None,
        begun: Stream | None = None,
    ) -> None:
        # TensorFlow 2.21's autotuning thread sleeps for up to seconds, and an iterator waits for it when it is dropped:
        # once an epoch. Without it, AUTOTUNE stands for as many calls as there are cores, up to 16.
        options = tf.data.Options()
        options.autotune.enabled = False
        self._dataset = dataset.with_options(options)
        self._has_more = has_more or (lambda upcoming: upcoming.has_value())
        self._continues = steps_per_epoch is not None
        cardinality = int(dataset.cardinality())
        self.steps_per_epoch = steps_per_epoch or (cardinality if cardinality >= 0 else None)
        self.passes = -1
        if begun is None:
            self._begin_pass()
        else:
            self.passes, self.batches = 0, 0
            self.iterator: Any = begun.iterator
            self.upcoming: tf.experimental.Optional = begun.upcoming
        if not self.has_more():
            raise ValueError(EMPTY)

    def _begin_pass(self, batches: int = 0) -> None:
        self.passes += 1
        self.batches = batches
        self.iterator = iter(self._dataset.skip(batches) if batches else self._dataset)
        self.upcoming = self.iterator.get_next_as_optional()

    def begin_epoch(self) -> None:
        """Start the next pass, unless the current one is fresh or goes on from epoch to epoch."""
        if not self.has_more() or (self.batches > 0 and not self._continues):
            self._begin_pass()

    def has_more(self) -> bool:
        """Say whether the pass has another batch."""
        return bool(self._has_more(self.upcoming))

    def peek(self) -> Any:
        """Return the upcoming element without taking it."""
        return self.upcoming.get_value()

    def advance(self, upcoming: tf.experimental.Optional, num_batches: int) -> None:
        """Take note that a loop has used batches, and of what it left."""
        self.upcoming = upcoming
        self.batches += num_batches

    def next_epoch(self) -> tuple[int, int]:
        """Return the position (passes, batches) at which the next epoch begins, once the current one has ended."""
        return (self.passes, self.batches) if self._continues else (self.passes + 1, 0)

    def seek(self, passes: int, batches: int) -> None:
        """Go on where another process stood: replay the passes before, skip the batches used.

        Args:
            passes: Passes begun before the one to stand in.
            batches: Batches of that pass already used.
        """
        if passes == self.passes:
            for _ in range(batches):
                self.upcoming = self.iterator.get_next_as_optional()
            self.batches = batches
            return
        data.seek(self._dataset, passes - self.passes - 1, 0)
        self.passes = passes - 1
        self._begin_pass(batches)
