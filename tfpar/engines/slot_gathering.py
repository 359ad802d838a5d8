"""Gathers the slots of all workers at the chief, in a temporary file rather than in memory.

worker 1   slots ──┐
worker 2   slots ──┴─ chunks ──► chief: an unnamed file, memory-mapped, so that one slot is read at a time
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
    """Yield the slots of other workers with their values on the chief, and nothing on other workers.

    Args:
        slots: The slots of all workers, in the same order on each.
        job: The workers. All of them must enter this context.
        folder: An existing folder of the chief for a file of the size of the slots. Defaults to the system's temporary
            folder.

    Raises:
        OSError: If the chief cannot write the file. Other workers raise ValueError.
    """
    others = [slot for slot in slots if holder_of(slot)]
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        with job.vote("Gathering the optimizer's state"):
            if job.is_chief:
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        failure: OSError | None = None
        for chunk in itertools.chain.from_iterable(_chunks(slot, job) for slot in others):
            try:
                if file is not None and failure is None:
                    file.write(chunk)
            except OSError as error:
                failure = error  # the other workers keep sending
        with job.vote("Gathering the optimizer's state"):
            if failure is not None:
                raise failure
        yield [] if file is None else _arrays(others, file)


def _chunks(slot: Any, job: Job) -> Iterator[bytes]:
    """Yield the bytes of a slot in chunks."""
    holder = holder_of(slot) or 0
    content = slot.numpy().tobytes() if holder == job.rank else b""
    for start in range(0, num_bytes(slot), PIECE_BYTES):
        yield job.broadcast(content[start : start + PIECE_BYTES], holder)


def _arrays(slots: Sequence[Any], file: IO[bytes]) -> list[tuple[Any, np.ndarray]]:
    """Return slots with their values as views of a file, which are read on access."""
    file.flush()
    ends = list(itertools.accumulate(map(num_bytes, slots), initial=0))
    content = np.memmap(file, np.uint8, "r", shape=(ends[-1],)) if ends[-1] else np.zeros(0, np.uint8)
    values = [content[start:end] for start, end in itertools.pairwise(ends)]
    return [
        (slot, value.view(tf.as_dtype(slot.dtype).as_numpy_dtype).reshape(tuple(slot.shape)))
        for slot, value in zip(slots, values, strict=True)
    ]
