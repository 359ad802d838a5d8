"""Iteration over a dataset, epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar import data, process_lock
from tfpar.engines.distributed import Distributed


class EpochIterator:
    """An iterator over the batches of a dataset, epoch after epoch.

    A pass is one iteration over the dataset. An epoch is one pass, unless `steps_per_epoch` is set: then a pass spans
    several epochs. As in Keras, an epoch ends early when its pass ends, and the next epoch begins a new pass:

        5 batches, 2 steps per epoch:  0 1 │ 2 3 │ 4 │ 0 1 │ …

    Args:
        distributed: The dataset, from `Engine.distribute`.
        steps_per_epoch: Steps per epoch. None: a whole pass.
        unused: An iterator over the same dataset from which no batch was taken, to continue.
        source: The Python source of the dataset, if any. Its passes begin with an epoch, not before.
        first: A dataset of one element, for `peek` before the first pass.
        restarts: Whether every epoch begins a new pass, even if `steps_per_epoch` is set.
        vote: Returns a context in which the error of one worker is raised on all.
        check_end: Raises an error if the data of this worker end elsewhere than those of the others.

    Attributes:
        distributed: The argument.
        batch_size: Examples in the first global batch; 0 until it is set.

    Raises:
        ValueError: If the dataset is empty.

    Example:
        >>> epoch_iterator = EpochIterator(Distributed(tf.data.Dataset.range(3)))
        >>> epoch_iterator.steps_per_epoch
        3
    """

    def __init__(
        self,
        distributed: Distributed,
        steps_per_epoch: int | None = None,
        unused: EpochIterator | None = None,
        source: data.PythonBatches | None = None,
        first: tf.data.Dataset | None = None,
        restarts: bool = False,
        vote: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        check_end: Callable[[str], None] | None = None,
    ) -> None:
        self._check_end = check_end
        self.distributed = distributed
        self._dataset = data.without_autotuning(distributed.dataset)
        self._source = source
        self._steps_asked = steps_per_epoch
        self._continues = steps_per_epoch is not None and not restarts
        cardinality = int(distributed.dataset.cardinality())
        self._batches_per_pass = (cardinality if cardinality >= 0 else None) if source is None else source.num_batches
        self.steps_per_epoch = steps_per_epoch or self._batches_per_pass
        self.iterator: Any = None
        self.upcoming: tf.experimental.Optional = None
        self.passes, self.batches, self.batch_size = -1, 0, 0
        self._pass_is_over = True
        with vote():
            if unused is not None:
                self.iterator, self.upcoming = unused.iterator, unused.upcoming
                self.passes, self._pass_is_over = unused.passes, unused._pass_is_over
            elif first is not None:
                self.upcoming = _next(iter(data.without_autotuning(first)))
            else:
                self._begin_pass()
        with vote():
            if not self.has_more():
                raise ValueError(data.EMPTY)

    def _begin_pass(self, batches: int = 0) -> None:
        self.passes += 1
        self.batches = batches
        self._pass_is_over = False
        if self._source is not None:
            with process_lock.paused():
                self._source.begin_pass(again=self.passes > 0 and self._steps_asked is None)
        self.iterator = iter(self._dataset.skip(batches) if batches else self._dataset)
        self.upcoming = _next(self.iterator)

    def begin_epoch(self) -> None:
        """Begin a new pass, unless the current one is unused or spans this epoch too."""
        if self._source is not None:
            self._source.begin_epoch()
        if self._pass_is_over or (self.batches > 0 and not self._continues):
            self._begin_pass()

    def end_epoch(self, num_steps: int) -> bool:
        """End an epoch after `num_steps` steps; return whether the data ended before `steps_per_epoch`."""
        if self._check_end is not None:
            self._check_end(f"{'more than ' * bool(self.upcoming.has_value())}{self.batches} batches in an epoch")
        ran_out = self._steps_asked is not None and num_steps < self._steps_asked and not self.has_more()
        self._pass_is_over = ran_out or self.batches == self._batches_per_pass
        if self._source is not None:
            if not self._continues:
                self.close()
            self._source.end_epoch()
        return ran_out

    def has_more(self) -> bool:
        """Return whether the pass has another batch."""
        return bool(self.distributed.has_more(self.upcoming))

    def peek(self) -> Any:
        """Return the upcoming element without taking it."""
        return self.upcoming.get_value()

    def read_next(self) -> None:
        """Take a batch, and read the next element."""
        self.advance(_next(self.iterator), 1)

    def advance(self, upcoming: tf.experimental.Optional, num_batches: int) -> None:
        """Record that a loop has taken batches and has read the upcoming element."""
        self.upcoming = upcoming
        self.batches += num_batches

    def next_epoch(self) -> tuple[int, int]:
        """Return the position (passes, batches) at which the next epoch begins, after `end_epoch`."""
        if self._continues and not self._pass_is_over:
            return self.passes, self.batches
        return self.passes + 1, 0

    def seek(self, passes: int, batches: int) -> None:
        """Move to a saved position: replay the passes before it, and skip batches of the current pass."""
        with process_lock.paused():
            self._seek(passes, batches)

    def _seek(self, passes: int, batches: int) -> None:
        if self._source is not None:
            self._seek_in_python(self._source, passes, batches)
            return
        if passes == self.passes:
            for _ in range(batches):
                self.upcoming = _next(self.iterator)
            self.batches = batches
            return
        data.seek(self._dataset, passes - self.passes - 1, 0)
        self.passes = passes - 1
        self._begin_pass(batches)

    def _seek_in_python(self, source: data.PythonBatches, passes: int, batches: int) -> None:
        epochs = 1
        if self._continues and self.steps_per_epoch and self._batches_per_pass:
            epochs = -(-self._batches_per_pass // self.steps_per_epoch)
        for _ in range(self.passes + 1, passes):
            source.skip_pass(epochs)
        self.passes = passes - 1
        if batches:
            source.resume(batches)
            if not self._continues:
                source.begin_epoch()
            self._begin_pass(batches)

    def close(self) -> None:
        """Stop the prefetching of a Python source."""
        if self._source is not None:
            with process_lock.paused():
                self._source.stop()


def _next(iterator: Any) -> tf.experimental.Optional:
    with process_lock.paused():  # another thread may need the lock to compute the element
        return iterator.get_next_as_optional()
