"""Messages between the workers of a job outside of a step, so that all workers take the same decision.

worker 0   fine ────┐            ┌─ raises the sentence of worker 1
worker 1   refuses ─┴─ all-reduce ┴─ raises its own
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfpar.cluster.other_worker_error import OtherWorkerError
from tfpar.messages.reasons import message_of
from tfpar.strategies.multi_worker.collectives import Group

PIECE_BYTES = 16 << 20  # of a message, in one all-reduce
_ON_ALL_WORKERS = "_tfpar_raised_on_all_workers"  # an attribute of errors that every worker raises


class Consensus:
    """Messages between workers, all of whom must call the same methods in the same order.

    Args:
        hosts: One device of each worker.
        rank: The rank of this worker.
        addresses: The addresses of all workers, by rank.
        sentence: Returns the message about an error of this worker for the others.
    """

    def __init__(
        self, hosts: Group, rank: int, addresses: Sequence[str], sentence: Callable[[Exception], str] = str
    ) -> None:
        self._hosts, self._rank, self._addresses, self._sentence = hosts, rank, addresses, sentence

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of numbers over all workers."""
        sums: np.ndarray = self._hosts.all_reduce(tf.constant(values, tf.float64)).numpy()
        return sums

    def broadcast_from(self, rank: int, message: bytes | None) -> bytes:
        """Return the message of one worker on every worker, sent in pieces, so that memory holds it once.

        Args:
            rank: The rank of the sender.
            message: The message; ignored on the other workers.
        """
        mine = message if rank == self._rank and message is not None else b""
        (size,) = map(int, self.all_reduce_sum([len(mine)]))
        received = io.BytesIO()
        for start in range(0, size, PIECE_BYTES):
            # An all-reduce of 32-bit words, which are zero on the other workers.
            words = np.zeros(-(-min(PIECE_BYTES, size - start) // 4), "int32")
            piece = mine[start : start + PIECE_BYTES]
            words.view("uint8")[: len(piece)] = np.frombuffer(piece, "uint8")
            words = self._hosts.all_reduce(tf.constant(words)).numpy()
            if not mine:
                received.write(words)
        received.truncate(size)
        return mine or received.getvalue()

    def first(self, holds_here: bool) -> int | None:
        """Return the lowest rank with a true value, None if there is none.

        Args:
            holds_here: The value of this worker.
        """
        flags = np.zeros(len(self._addresses))
        flags[self._rank] = holds_here
        found = np.flatnonzero(self.all_reduce_sum(flags.tolist()))
        return int(found[0]) if len(found) else None

    @contextlib.contextmanager
    def raising_on_all_workers(self, what: str | None = None) -> Iterator[None]:
        """Raise on every worker, at the end of this context, the error of the first worker that raised inside.

        It surrounds checks of a worker's own examples, and functions of the user. Without it, the other workers would
        wait for the next message of a worker that has raised. Contexts may be nested.

        Args:
            what: What runs inside, for the message on the other workers; None for the message of the error alone.

        Raises:
            ValueError: With the message of the first worker that raised; a worker that raised raises its own error.
            OtherWorkerError: The same, after an error of the operating system that may not come again.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if is_raised_on_all_workers(error):  # an inner context has raised on every worker
                raise
            own = error
        rank = self.first(own is not None)
        if rank is None:
            return
        sent = None if own is None else json.dumps([_may_pass(own), self._message(own, what)]).encode()
        may_pass, sentence = json.loads(self.broadcast_from(rank, sent))
        raise raised_on_all_workers(own or (OtherWorkerError if may_pass else ValueError)(sentence))

    def _message(self, error: Exception, what: str | None) -> str:
        if what is None:
            return self._sentence(error)
        worker = f"worker {self._rank} ({self._addresses[self._rank]})"
        return f"{what} failed on {worker} with {type(error).__name__}: {message_of(error)}"


def raised_on_all_workers(error: Exception) -> Exception:
    """Mark an error that every worker raises at the same place, and return it.

    Args:
        error: The error.
    """
    setattr(error, _ON_ALL_WORKERS, True)
    return error


def is_raised_on_all_workers(error: BaseException) -> bool:
    """Return whether every worker raises an error at the same place."""
    return getattr(error, _ON_ALL_WORKERS, False)


def _may_pass(error: Exception) -> bool:
    """Return whether a new start may succeed after an error."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
