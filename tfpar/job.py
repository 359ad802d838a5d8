"""This process among the workers of its job: messages and votes outside of a step, so that all take one decision.

worker 0   fine ────┐            ┌─ raises the sentence of worker 1
worker 1   refuses ─┴─ all-reduce ┴─ raises its own

Pure Python over one all-reduce of small arrays.
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
    """The workers that train one model, of which this process is one. Alone, a process sends no message.

    All workers must call the same methods in the same order, outside of a step.

    Args:
        addresses: The addresses of all workers, by rank.
        rank: The rank of this worker; 0 is the chief, which decides and writes files.
        all_reduce: Sums an array over all workers, elementwise; not called in a job of one worker.
        sentence: Returns the message about an error of this worker for the others, with the help of `user_message`.
        reported: Returns for `user_message` a context in which a failure of TensorFlow on one worker alone is an error
            on all, with its reason; None for one worker without others.

    Attributes:
        user_message: Returns a sentence for the other workers about an error of the data; None for other errors.

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
        """Return the sums of numbers over all workers, float64 `[len(values)]`."""
        own = np.asarray(values, "float64")
        return own if self.num_workers == 1 else self._all_reduce(own)

    def barrier(self) -> None:
        """Return when all workers have called this method."""
        self.sum([0.0])

    def first(self, holds_here: bool) -> int | None:
        """Return the lowest rank with a true value; None if there is none.

        Args:
            holds_here: The value of this worker.
        """
        flags = np.zeros(self.num_workers)
        flags[self.rank] = holds_here
        ranks = np.flatnonzero(self.sum(flags.tolist()))
        return int(ranks[0]) if len(ranks) else None

    def broadcast(self, message: bytes | None, sender: int = 0) -> bytes:
        """Return the message of one worker on every worker.

        It is sent in pieces, so that memory holds it once.

        Args:
            message: The message; ignored on the other workers.
            sender: The rank of the worker that sends it; the chief by default.
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
        """Return the chief's value of a JSON structure on every worker."""
        return json.loads(self.broadcast(json.dumps(value).encode()))

    def require_equal(self, facts: dict[str, str]) -> None:
        """Refuse workers that differ in a property, such as a version.

        Args:
            facts: The properties as texts, by name.

        Raises:
            ValueError: If a worker's text differs from the chief's; on every worker, with the first different line.
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
        """Raise on every worker, at the end of this context, the error of the first worker that raised inside.

        It surrounds checks of a worker's own examples, and functions of the user. Without it, the other workers would
        wait for the next message of a worker that has raised. Contexts may be nested; inside one, no message between
        workers may follow a statement that can raise.

        Args:
            what: What runs inside, for the message on the other workers; None for the message of the error alone.

        Raises:
            ValueError: With the message of the first worker that raised; a worker that raised raises its own error.
            OtherWorkerError: The same, after an error of the operating system that may not come again.
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
        sent = None if own is None else json.dumps([_may_pass(own), self._message(own, what)]).encode()
        may_pass, sentence = json.loads(self.broadcast(sent, rank))
        raise raised_on_all_workers(own or (OtherWorkerError if may_pass else ValueError)(sentence))

    def _message(self, error: Exception, what: str | None) -> str:
        if what is None:
            return self._sentence(error, self.user_message)
        worker = f"worker {self.rank} ({self.addresses[self.rank]})"
        return f"{what} failed on {worker} with {type(error).__name__}: {message_of(error)}"

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a failure of TensorFlow on one worker alone is an error on all, with its reason."""
        return contextlib.nullcontext() if self._reported is None else self._reported(self.user_message)


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


def _differences(chiefs: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return the properties in which two workers differ, each with its first different line."""
    differences = []
    for name in chiefs:
        lines = itertools.zip_longest(chiefs[name].splitlines(), theirs.get(name, "").splitlines(), fillvalue="")
        if different := next(
            ((wanted.strip(), received.strip()) for wanted, received in lines if wanted != received), None
        ):
            differences.append(f"{name} ({different[1]!r:.80} instead of {different[0]!r:.80})")
    return differences
