"""Barriers at which workers notice that they are at different places of the program.

    worker 0   callback of the chief alone: evaluate ─┐
                                                      ├─ messages of equal size: both raise the same error
    worker 1   the vote after the step ───────────────┘

Messages of different sizes would make TensorFlow raise an error about shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpar.job import Job, raised_on_all_workers

VOTE = "none"  # the vote within a method
_PLACES = (VOTE, "fit", "evaluate", "predict", "build")
_MAX_VALUES = 6  # of a vote, besides one for each worker


class Deferred(NamedTuple):
    """An error that this worker has not raised yet.

    Args:
        what: What raised it, for the message on the other workers.
        error: The error.
    """

    what: str
    error: Exception


def barrier(job: Job, place: str, values: Sequence[float] = (), deferred: Deferred | None = None) -> np.ndarray:
    """Sum values over all workers, which must be at the same place.

    Args:
        job: The workers.
        place: The trainer's method that this worker begins, or `VOTE` within one.
        values: The values of this worker.
        deferred: An error of this worker, which ends the job.

    Raises:
        ValueError: If workers are at different places, or another worker has an error; on every worker.
        Exception: The deferred error.
    """
    max_values = _MAX_VALUES + job.num_workers
    assert len(values) <= max_values
    frame = np.zeros(1 + max_values + job.num_workers)
    frame[0] = deferred is not None
    frame[1 : 1 + len(values)] = values
    frame[1 + max_values + job.rank] = _PLACES.index(place)
    sums = job.sum(frame.tolist())
    if sums[0] > 0:
        with job.vote(None if deferred is None else deferred.what):
            if deferred is not None:
                raise deferred.error
    places = [_PLACES[int(number)] for number in sums[1 + max_values :]]
    for rank, other in enumerate(places):
        if other != places[0]:
            raise raised_on_all_workers(
                ValueError(
                    "All workers must call the methods of a trainer in the same order, and "
                    f"worker {rank} calls {other} where the chief calls {places[0]}. Call each on every worker, even "
                    "if only the chief uses the result."
                )
            )
    return sums[1 : 1 + len(values)]
