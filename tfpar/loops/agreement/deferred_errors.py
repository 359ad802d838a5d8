"""Errors of one worker, deferred until the workers vote, so that all of them end with the reason.

worker 0   step ─── hook ───────── step ─── vote ─── raises an error that names worker 1
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
    """Defers errors of this worker in code that each worker runs by itself, such as callbacks.

    Raised at once, they would leave the other workers waiting in the next step. With one worker they are.

    Args:
        job: The workers.
        read_order: The batches that this worker has read, which are compared at each vote.
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
        """Defer exceptions raised here until the next vote. The body must not call collectives.

        Args:
            what: What runs here, for the message on the other workers.
        """
        try:
            yield
        except Exception as error:
            if self._job.num_workers == 1 or is_raised_on_all_workers(error):
                raise
            self._deferred = self._deferred or Deferred(what, error)

    def vote(self, votes: Sequence[float] = ()) -> np.ndarray:
        """Sum votes over all workers; every worker must call this.

        Raises:
            Exception: The deferred error of this worker.
            ValueError: If another worker has deferred an error, or has read other batches than the chief.
        """
        summaries = self.read_order.summaries()
        try:
            own, self._deferred = self._deferred, None
            sums = barrier(self._job, VOTE, [*summaries, *votes], own)
        except tf.errors.OpError:
            if own is not None:  # the others wait in a collective of the hook that has failed here
                raise own.error from None
            raise
        self.read_order.compare(sums[: len(summaries)])
        return sums[len(summaries) :]


class DeferringCallbacks:
    """The callbacks of a `fit`, `evaluate` or `predict`. After a hook has failed, no other hook runs until the vote.

    Args:
        callback_list: The callbacks of this worker.
        strategy: The strategy.
        saved: The model, if a callback saves it at the end of epochs and its optimizer state is sharded.
        read_order: As for `DeferredErrors`.

    Attributes:
        errors: The deferred errors.
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
        """The callbacks of this worker."""
        callbacks: list[keras.callbacks.Callback] = self._list.callbacks
        return callbacks

    def on_epoch_end(self, *arguments: Any) -> None:
        """Call the hook, with the optimizer state of all workers if it saves the model."""
        with contextlib.ExitStack() as stack:
            if self._saved is not None:
                stack.enter_context(self._strategy.engine.whole_state(self._saved))
            self._call(self._list.on_epoch_end, *arguments)

    def __getattr__(self, name: str) -> Any:
        """Return any other hook, such as `on_train_begin`."""
        return functools.partial(self._call, getattr(self._list, name))

    def _call(self, hook: Any, *arguments: Any) -> None:
        if not self.errors.any:
            with self.errors.deferring("A callback"):
                hook(*arguments)
