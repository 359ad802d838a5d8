"""Messages between the workers of a job outside of a step, so that all workers take the same decision.

worker 0   fine ────┐            ┌─ raises the sentence of worker 1
worker 1   refuses ─┴─ all-reduce ┴─ raises its own
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import Group


class Consensus:
    """Messages between workers, all of whom must call the same methods in the same order.

    Args:
        hosts: One device of each worker.
        rank: The rank of this worker.
        num_workers: The number of workers.
    """

    def __init__(self, hosts: Group, rank: int, num_workers: int) -> None:
        self._hosts, self._rank, self._num_workers = hosts, rank, num_workers

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of numbers over all workers."""
        sums: np.ndarray = self._hosts.all_reduce(tf.constant(values, tf.float64)).numpy()
        return sums

    def broadcast_from(self, rank: int, message: bytes | None) -> bytes:
        """Return the message of one worker on every worker.

        Args:
            rank: The rank of the sender.
            message: The message; ignored on the other workers.
        """
        mine = message if rank == self._rank and message is not None else b""
        (size,) = self.all_reduce_sum([len(mine)])
        # An all-reduce of 32-bit words, which are zero on the other workers.
        words = np.zeros(-(-int(size) // 4), "int32")
        words.view("uint8")[: len(mine)] = np.frombuffer(mine, "uint8")
        words = self._hosts.all_reduce(tf.constant(words)).numpy() if len(words) else words
        return words.tobytes()[: int(size)]

    def first(self, holds_here: bool) -> int | None:
        """Return the lowest rank with a true value, None if there is none.

        Args:
            holds_here: The value of this worker.
        """
        flags = np.zeros(self._num_workers)
        flags[self._rank] = holds_here
        found = np.flatnonzero(self.all_reduce_sum(flags.tolist()))
        return int(found[0]) if len(found) else None

    @contextlib.contextmanager
    def raising_on_all_workers(self) -> Iterator[None]:
        """Raise on every worker, at the end of this context, the error of the first worker that raised inside.

        It surrounds checks of a worker's own examples. Without it, the other workers would wait for the next message of
        a worker that has raised.

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
        message = self.broadcast_from(rank, None if own is None else str(own).encode()).decode()
        if rank == self._rank and own is not None:
            raise own
        raise ValueError(message) from own
