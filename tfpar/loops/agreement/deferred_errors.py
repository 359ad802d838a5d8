"""Errors of one worker alone, deferred until the workers vote, so that all of them end with the reason.

worker 0   step ─── hook ───────── step ─── vote ─── raises a sentence about the error of worker 1
                                             │
worker 1   step ─── hook raises ── step ─────┴────── raises its own error
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.job import Job, is_raised_on_all_workers
from tfpar.loops.agreement.barriers import VOTE, Deferred, barrier
from tfpar.loops.resuming.read_order import ReadOrder
from tfpar.strategies import Strategy


class DeferredErrors:
    """Errors of this worker in code that each worker runs by itself, such as callbacks.

    Without them the other workers would wait in the next step, until the process of the failed worker ends. With one
    worker errors are raised at once.

    Args:
        job: The workers, which vote.
        read_order: The batches that this worker has read, which the workers compare with each vote; None for none.

    Attributes:
        read_order: The same.
    """

    def __init__(self, job: Job, read_order: ReadOrder | None = None) -> None:
        self._job = job
        self.read_order = read_order or ReadOrder(job)
        self._deferred: Deferred | None = None

    @property
    def any(self) -> bool:
        """Whether an error of this worker is deferred."""
        return self._deferred is not None

    @contextlib.contextmanager
    def deferring(self, what: str) -> Iterator[None]:
        """Defer exceptions raised in this context until the next vote; nothing in it may communicate.

        Args:
            what: What runs inside, for the message on the other workers.
        """
        try:
            yield
        except Exception as error:
            if self._job.num_workers == 1 or is_raised_on_all_workers(error):
                raise
            self._deferred = self._deferred or Deferred(what, error)

    def vote(self, votes: Sequence[float] = ()) -> np.ndarray:
        """Return the sums of numbers over all workers, which must all call this.

        Args:
            votes: The numbers of this worker.

        Raises:
            Exception: The deferred error of this worker.
            ValueError: With the error of another worker, and its rank and address; or if a worker has read other
                batches than the chief.
        """
        summaries = self.read_order.summaries()
        try:
            own, self._deferred = self._deferred, None
            sums = barrier(self._job, VOTE, [*summaries, *votes], own)
        except tf.errors.OpError:
            if own is not None:  # the others do not vote: it ended a hook in which they communicate
                raise own.error from None
            raise
        self.read_order.compare(sums[: len(summaries)])
        return sums[len(summaries) :]


class DeferringCallbacks:
    """The callbacks of one `fit`, `evaluate` or `predict`, whose hooks do nothing after one has raised.

    Args:
        callback_list: The callbacks of this worker.
        strategy: The strategy.
        saved: A model that a callback saves at the end of epochs, with the optimizer's state of all workers; None for
            none.
        read_order: As for `DeferredErrors`.

    Attributes:
        errors: The errors of hooks.
    """

    def __init__(
        self,
        callback_list: keras.callbacks.CallbackList,
        strategy: Strategy,
        saved: keras.Model | None = None,
        read_order: ReadOrder | None = None,
    ) -> None:
        self._list, self._strategy, self._saved = callback_list, strategy, saved
        self.errors = DeferredErrors(strategy.job, read_order)

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks."""
        found: list[keras.callbacks.Callback] = self._list.callbacks
        return found

    def on_epoch_end(self, *arguments: Any) -> None:
        """Call the hook of the list, which may save a model."""
        with contextlib.ExitStack() as stack:
            if self._saved is not None:
                stack.enter_context(self._strategy.engine.whole_state(self._saved))
            self._call(self._list.on_epoch_end, *arguments)

    def __getattr__(self, name: str) -> Any:
        """Return a hook of the list, such as `on_train_begin`."""
        return functools.partial(self._call, getattr(self._list, name))

    def _call(self, hook: Any, *arguments: Any) -> None:
        if not self.errors.any:
            with self.errors.deferring("A callback"):
                hook(*arguments)
