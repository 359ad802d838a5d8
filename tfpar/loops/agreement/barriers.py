"""Barriers with a place: workers that wait at different places notice it, and raise.

    worker 0   callback of the chief alone: evaluate ─┐
                                                      ├─ one message of one size: both raise a sentence
    worker 1   the vote after the step ───────────────┘

With a message of its own size for each kind of call, TensorFlow would raise about shapes, or sum numbers that do not
belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpar.job import Job, raised_on_all_workers

VOTE = "none"  # no method, but the vote inside of one
_PLACES = (VOTE, "fit", "evaluate", "predict", "build")
_MAX_VALUES = 6  # of a vote, and one for each worker


class Deferred(NamedTuple):
    """An error of this worker that it has not raised yet.

    Args:
        what: What has raised it, for the message on the other workers.
        error: The error.
    """

    what: str
    error: Exception


def barrier(job: Job, place: str, values: Sequence[float] = (), deferred: Deferred | None = None) -> np.ndarray:
    """Return the sums of numbers over all workers, all of which must be at the same place.

    Args:
        job: The workers.
        place: The method of a trainer that this worker begins, or `VOTE` inside of one.
        values: The numbers of this worker.
        deferred: An error of this worker, which ends the job.

    Raises:
        ValueError: If workers are at different places, or another worker has an error; on every worker.
        Exception: The deferred error.
    """
    most = _MAX_VALUES + job.num_workers
    assert len(values) <= most
    frame = np.zeros(1 + most + job.num_workers)
    frame[0] = deferred is not None
    frame[1 : 1 + len(values)] = values
    frame[1 + most + job.rank] = _PLACES.index(place)
    sums = job.sum(frame.tolist())
    if sums[0] > 0:
        with job.vote(None if deferred is None else deferred.what):
            if deferred is not None:
                raise deferred.error
    places = [_PLACES[int(number)] for number in sums[1 + most :]]
    for rank, other in enumerate(places):
        if other != places[0]:
            raise raised_on_all_workers(
                ValueError(
                    "All workers must call the methods of a trainer in the same order, and "
                    f"worker {rank} calls {other} where the chief calls {places[0]}. Call each on every worker, also "
                    "where the chief alone uses the result."
                )
            )
    return sums[1 : 1 + len(values)]
