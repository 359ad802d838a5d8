"""Messages and votes between the workers of a job, outside of a step.

worker 0   succeeds ─┐            ┌─ raises the error of worker 1
worker 1   fails ────┴─ all-reduce ┴─ raises its own error

Everything here is built on one all-reduce of small arrays.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfpar.cluster.other_worker_error import OtherWorkerError
from tfpar.messages.reasons import message_of

PIECE_BYTES = 16 << 20  # of a message, in one all-reduce
_ON_ALL_WORKERS = "_tfpar_raised_on_all_workers"  # an attribute of errors that every worker raises

UserMessage: TypeAlias = Callable[[BaseException], str | None]


class Job:
    """The workers that train one model together; this process is one of them.

    All workers must call the same methods in the same order, outside of a step. A job of one worker sends no messages.

    Args:
        addresses: Addresses of all workers, by rank.
        rank: Rank of this worker; rank 0 is the chief, which decides for all and writes files.
        all_reduce: Sums an array elementwise over all workers; not called in a job of one worker.
        sentence: `(error, user_message) -> message` for the other workers about an error of this one.
        reported: `(user_message) -> context` that raises a TensorFlow failure of one worker on all workers, with its
            cause; None in a job of one worker.

    Attributes:
        user_message: Returns the message for the other workers about an error in the data; None for other errors.

    Example:
        >>> job = Job()
        >>> job.is_chief, job.num_workers, job.broadcast(b"decision")
        (True, 1, b'decision')
    """

    def __init__(
        self,
        addresses: Sequence[str] = ("localhost:0",),
        rank: int = 0,
        all_reduce: Callable[[np.ndarray], np.ndarray] = np.asarray,
        sentence: Callable[[Exception, UserMessage], str] = lambda error, user_message: message_of(error),
        reported: Callable[[UserMessage], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self.addresses, self.rank, self._all_reduce = tuple(addresses), rank, all_reduce
        self._sentence, self._reported = sentence, reported
        self.user_message: UserMessage = lambda error: None

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process decides for all workers and writes files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the elementwise sum of `values` over all workers, a float64 array."""
        own = np.asarray(values, "float64")
        return own if self.num_workers == 1 else self._all_reduce(own)

    def barrier(self) -> None:
        """Wait until all workers have called this method."""
        self.sum([0.0])

    def first(self, holds_here: bool) -> int | None:
        """Return the lowest rank whose condition is true; None if there is none.

        Args:
            holds_here: The condition on this worker.
        """
        flags = np.zeros(self.num_workers)
        flags[self.rank] = holds_here
        ranks = np.flatnonzero(self.sum(flags.tolist()))
        return int(ranks[0]) if len(ranks) else None

    def broadcast(self, message: bytes | None, sender: int = 0) -> bytes:
        """Return the message of one worker on all workers.

        It is sent in pieces, so that memory holds only one copy.

        Args:
            message: The message; ignored on all workers but the sender.
            sender: Rank of the sender; the chief by default.
        """
        mine = message if sender == self.rank and message is not None else b""
        if self.num_workers == 1:
            return mine
        (size,) = map(int, self.sum([len(mine)]))
        received = io.BytesIO()
        for start in range(0, size, PIECE_BYTES):
            # An all-reduce of 32-bit words, which are zero on the other workers.
            words = np.zeros(-(-min(PIECE_BYTES, size - start) // 4), "int32")
            piece = mine[start : start + PIECE_BYTES]
            words.view("uint8")[: len(piece)] = np.frombuffer(piece, "uint8")
            words = self._all_reduce(words)
            if not mine:
                received.write(words.data)
        received.truncate(size)
        return mine or received.getvalue()

    def agree(self, value: Any) -> Any:
        """Return the chief's `value`, a JSON structure, on all workers."""
        return json.loads(self.broadcast(json.dumps(value).encode()))

    def require_equal(self, facts: dict[str, str]) -> None:
        """Raise ValueError on all workers if they differ in a property, such as a version.

        Args:
            facts: Properties as text, by name.

        Raises:
            ValueError: If a property of a worker differs from the chief's; the message has the first different line.
        """
        if self.num_workers == 1:
            return
        chiefs = self.agree(facts)
        rank = self.first(facts != chiefs)
        if rank is None:
            return
        theirs = json.loads(self.broadcast(json.dumps(facts).encode(), rank))
        raise ValueError(
            f"All workers must be equal, and worker {rank} ({self.addresses[rank]}) differs from the chief in "
            f"{'; '.join(_differences(chiefs, theirs))}. Start all of them with the same command, the same files and "
            "the same packages."
        )

    def vote(self, what: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Raise an error of one worker on all workers, at the end of this context.

        Use it around code that may fail on one worker alone: checks of its data, functions of the user. Otherwise the
        other workers would wait forever for its next message. Contexts may be nested. Inside a context, do not
        communicate after a statement that can raise.

        Args:
            what: Name of the operation, for the message on the other workers; None for the error message alone.

        Raises:
            ValueError: With the message of the first worker that failed; workers that failed raise their own error.
            OtherWorkerError: The same, after an operating system error that a new start may not meet again.
        """
        return contextlib.nullcontext() if self.num_workers == 1 else self._voting(what)

    @contextlib.contextmanager
    def _voting(self, what: str | None) -> Iterator[None]:
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if is_raised_on_all_workers(error):  # by an inner context
                raise
            own = error
        rank = self.first(own is not None)
        if rank is None:
            return
        sent = None if own is None else json.dumps([_is_transient(own), self._message(own, what)]).encode()
        is_transient, message = json.loads(self.broadcast(sent, rank))
        raise raised_on_all_workers(own or (OtherWorkerError if is_transient else ValueError)(message))

    def _message(self, error: Exception, what: str | None) -> str:
        if what is None:
            return self._sentence(error, self.user_message)
        worker = f"worker {self.rank} ({self.addresses[self.rank]})"
        return f"{what} failed on {worker} with {type(error).__name__}: {message_of(error)}"

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that raises a TensorFlow failure of one worker on all workers, with its cause."""
        return contextlib.nullcontext() if self._reported is None else self._reported(self.user_message)


def raised_on_all_workers(error: Exception) -> Exception:
    """Mark an error as one that all workers raise at the same place, and return it.

    Args:
        error: The error to mark.
    """
    setattr(error, _ON_ALL_WORKERS, True)
    return error


def is_raised_on_all_workers(error: BaseException) -> bool:
    """Return True if all workers raise this error at the same place."""
    return getattr(error, _ON_ALL_WORKERS, False)


def _is_transient(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _differences(chiefs: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Describe each property in which two workers differ by its first different line."""
    differences = []
    for name in chiefs:
        lines = itertools.zip_longest(chiefs[name].splitlines(), theirs.get(name, "").splitlines(), fillvalue="")
        if pair := next((pair for pair in lines if pair[0] != pair[1]), None):
            expected, received = (line.strip() for line in pair)
            differences.append(f"{name} ({received!r:.80} instead of {expected!r:.80})")
    return differences
