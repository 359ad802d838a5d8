"""What all workers of a job ask each other outside of a step, so that they decide alike.

worker 0   fine ────┐            ┌─ raises the sentence of worker 1
worker 1   refuses ─┴─ all-reduce ┴─ raises its own
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import Group


class Agreement:
    """Messages between workers, all of whom must call the same methods in the same order.

    Args:
        hosts: One device of each worker.
        rank: Of this worker.
        num_workers: How many there are.
    """

    def __init__(self, hosts: Group, rank: int, num_workers: int) -> None:
        self._hosts, self._rank, self._num_workers = hosts, rank, num_workers

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of some numbers over all workers."""
        sums: np.ndarray = self._hosts.all_reduce(tf.constant(values, tf.float64)).numpy()
        return sums

    def message_of(self, rank: int, message: bytes | None) -> bytes:
        """Return a worker's message on every worker.

        Args:
            rank: Of the worker.
            message: This worker's; not used on the others.
        """
        mine = message if rank == self._rank and message is not None else b""
        (size,) = self.all_reduce_sum([len(mine)])
        # Numbers are summed, not bytes: whole 32-bit words, to which the others add nothing.
        words = np.zeros(-(-int(size) // 4), "int32")
        words.view("uint8")[: len(mine)] = np.frombuffer(mine, "uint8")
        words = self._hosts.all_reduce(tf.constant(words)).numpy() if len(words) else words
        return words.tobytes()[: int(size)]

    def first(self, holds_here: bool) -> int | None:
        """Return the rank of the first worker for which something holds, None for none."""
        flags = np.zeros(self._num_workers)
        flags[self._rank] = holds_here
        found = np.flatnonzero(self.all_reduce_sum(flags.tolist()))
        return int(found[0]) if len(found) else None

    @contextlib.contextmanager
    def raising_together(self) -> Iterator[None]:
        """Raise on every worker, at the end of this context, what the first of them raised inside.

        For what depends on a worker's own examples: the others would wait for its next message.

        Raises:
            ValueError: With the message of the first worker that raised; that worker raises its own error.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        rank = self.first(own is not None)
        if rank is None:
            return
        message = self.message_of(rank, None if own is None else str(own).encode()).decode()
        if rank == self._rank and own is not None:
            raise own
        raise ValueError(message) from own
