"""The slots of all workers at the chief, in a temporary file in place of its memory.

worker 1   slots ──┐
worker 2   slots ──┴─ pieces ──► chief: a file without a name, of which it reads one slot after another
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpar._compat import keras_divided_state
from tfpar.job import PIECE_BYTES
from tfpar.strategies.multi_worker.collectives import Group
from tfpar.strategies.multi_worker.worker import Worker

Lent = list[tuple[Any, np.ndarray]]


@contextlib.contextmanager
def gathered(
    slots: Sequence[Any], worker: Worker, hosts: Group, folder: Path | None
) -> Iterator[list[tuple[Any, np.ndarray]]]:
    """Return a context with the slots of other workers at the chief; none on another worker.

    Args:
        slots: The divided slots of all workers, in the same order on each.
        worker: The strategy of this worker; all workers must call this.
        hosts: One device of each worker.
        folder: An existing folder of the chief; None for that of temporary files.

    Raises:
        OSError: If the chief cannot write there; ValueError on the other workers.
    """
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        with worker.job.vote("Gathering the optimizer's state"):
            if worker.is_chief:
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        yield _gather(slots, worker, hosts, file)


def _gather(slots: Sequence[Any], worker: Worker, hosts: Group, file: IO[bytes] | None) -> Lent:
    failure: OSError | None = None
    others = [slot for slot in slots if keras_divided_state.holder_of(slot)]
    in_order = sorted(others, key=keras_divided_state.holder_of)
    for rank in range(1, worker.num_workers):
        held = [slot for slot in in_order if keras_divided_state.holder_of(slot) == rank]
        for piece in _pieces(held, worker.rank == rank, hosts):
            try:
                if file is not None and failure is None:
                    file.write(piece)
            except OSError as error:
                failure = error  # the other workers send their pieces
    with worker.job.vote("Gathering the optimizer's state"):
        if failure is not None:
            raise failure
        return [] if file is None else _arrays(in_order, file)


def _pieces(slots: Sequence[Any], is_holder: bool, hosts: Group) -> Iterator[bytes]:
    """Yield the bytes of slots, one after another, in pieces: an all-reduce of words that are zero elsewhere."""
    left = sum(map(_num_bytes, slots))
    content = _content(slots) if is_holder else iter(())
    rest = memoryview(b"")
    while left:
        size = min(left, PIECE_BYTES)
        words = np.zeros(-(-size // 4), "int32")
        filled = 0
        while is_holder and filled < size:
            rest = rest or next(content)
            part = rest[: size - filled]
            words.view("uint8")[filled : filled + len(part)] = np.frombuffer(part, "uint8")
            rest, filled = rest[len(part) :], filled + len(part)
        yield hosts.all_reduce(tf.constant(words)).numpy().tobytes()[:size]
        left -= size


def _content(slots: Sequence[Any]) -> Iterator[memoryview]:
    for slot in slots:
        if _num_bytes(slot):
            yield memoryview(np.ascontiguousarray(slot.numpy()).tobytes())


def _num_bytes(slot: Any) -> int:
    num_elements: int = math.prod(slot.shape)
    return num_elements * _type(slot).itemsize


def _type(slot: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(tf.as_dtype(slot.dtype).as_numpy_dtype)
    return found


def _arrays(slots: Sequence[Any], file: IO[bytes]) -> Lent:
    """Return the slots of a file as arrays that are read when they are needed."""
    file.flush()
    total = sum(map(_num_bytes, slots))
    content = np.memmap(file, np.uint8, "r", shape=(total,)) if total else np.zeros(0, np.uint8)
    arrays, start = [], 0
    for slot in slots:
        stop = start + _num_bytes(slot)
        arrays.append((slot, content[start:stop].view(_type(slot)).reshape(tuple(slot.shape))))
        start = stop
    return arrays
