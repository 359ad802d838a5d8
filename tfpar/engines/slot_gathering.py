"""The slots of all workers at the chief, in a temporary file in place of its memory.

worker 1   slots ──┐
worker 2   slots ──┴─ pieces ──► chief: a file without a name, of which it reads one slot after another
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpar._compat.optimizers.keras_sharded_slots import holder_of
from tfpar.job import PIECE_BYTES, Job
from tfpar.placement.owners import num_bytes


@contextlib.contextmanager
def gathered(slots: Sequence[Any], job: Job, folder: Path | None) -> Iterator[list[tuple[Any, np.ndarray]]]:
    """Return a context with the slots of other workers, and their values, at the chief; none on another worker.

    Args:
        slots: The slots of all workers, in the same order on each.
        job: The workers, which must all call this.
        folder: An existing folder of the chief for a file of their size; None for that of temporary files.

    Raises:
        OSError: If the chief cannot write there; ValueError on the other workers.
    """
    others = [slot for slot in slots if holder_of(slot)]
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        with job.vote("Gathering the optimizer's state"):
            if job.is_chief:
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        failure: OSError | None = None
        for piece in itertools.chain.from_iterable(_pieces(slot, job) for slot in others):
            try:
                if file is not None and failure is None:
                    file.write(piece)
            except OSError as error:
                failure = error  # the other workers send their pieces
        with job.vote("Gathering the optimizer's state"):
            if failure is not None:
                raise failure
        yield [] if file is None else _arrays(others, file)


def _pieces(slot: Any, job: Job) -> Iterator[bytes]:
    """Yield the bytes of a slot, in pieces that fit into memory."""
    holder = holder_of(slot) or 0
    content = slot.numpy().tobytes() if holder == job.rank else b""
    for start in range(0, num_bytes(slot), PIECE_BYTES):
        yield job.broadcast(content[start : start + PIECE_BYTES], holder)


def _arrays(slots: Sequence[Any], file: IO[bytes]) -> list[tuple[Any, np.ndarray]]:
    """Return slots with their values in a file, which are read when they are needed."""
    file.flush()
    ends = list(itertools.accumulate(map(num_bytes, slots), initial=0))
    content = np.memmap(file, np.uint8, "r", shape=(ends[-1],)) if ends[-1] else np.zeros(0, np.uint8)
    values = [content[start:end] for start, end in itertools.pairwise(ends)]
    return [
        (slot, value.view(tf.as_dtype(slot.dtype).as_numpy_dtype).reshape(tuple(slot.shape)))
        for slot, value in zip(slots, values, strict=True)
    ]
