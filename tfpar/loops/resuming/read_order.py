"""The order in which workers read global batches, of which each trains on its part: compared at every vote.

    worker 0   steps read a b │ digest of both ─┐
                              │                 ├─ vote: equal, or the workers look for the first step that differs
    worker 1   steps read a c │ digest of both ─┘

Workers that read in different orders train on some examples twice and leave out others.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tfpar import data
from tfpar.job import Job, raised_on_all_workers
from tfpar.messages import user_warnings

_RULE = "All workers must read the same global batches, of which each takes its part"
_IN_ONE_ORDER = (
    "Read in one order: with a seed for shuffle and sample_from_datasets, and with deterministic=True for interleave, "
    "map and tf.data.Options"
)
_SUMMARY_BYTES = 6  # so that a sum of floats holds it exactly
_ROUNDING = 1e-6  # of processors of other models, relative


class ReadOrder:
    """Digests of the global batches that this worker has read since the last vote.

    Args:
        job: The workers.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first, self._digests = 0, np.zeros([0, data.NUM_NUMBERS])
        self._has_warned = False

    def note(self, first: int, digests: Any) -> None:
        """Keep the digests of the next steps for the vote.

        Args:
            first: The index of the first step in its epoch.
            digests: `[steps, numbers]`, a tensor or rows; None or empty where the workers do not read the same batches.
        """
        rows = np.asarray([] if digests is None else digests, "float64")
        self._first, self._digests = first, rows.reshape(-1, data.NUM_NUMBERS)

    def summaries(self) -> list[float]:
        """Return a number for each worker, to be summed over all workers: that of this one, and 0 for the others."""
        found = [0.0] * self._job.num_workers
        if not (self._has_warned and self._is_drawn()):
            content = hashlib.blake2b(self._digests.tobytes(), digest_size=_SUMMARY_BYTES).digest()
            found[self._job.rank] = float(int.from_bytes(content))
        return found

    def compare(self, summaries: np.ndarray) -> None:
        """Refuse workers that have read other batches; all workers must call this.

        Where random numbers reach all tensors of the batches, as in mixup, it warns once.

        Args:
            summaries: The sums over all workers.

        Raises:
            ValueError: If a worker has read other batches than the chief; on every worker.
        """
        own, self._digests = self._digests, self._digests[:0]
        if len(set(summaries)) == 1:
            return
        steps, is_drawn = self._first_differences(own)
        rank = min(range(len(steps)), key=lambda rank: steps[rank])
        if steps[rank] == np.inf:  # they were rounded in other ways
            return
        if not is_drawn:
            step = f"worker {rank} has read another batch than the chief in step {int(steps[rank])} of the epoch"
            raise raised_on_all_workers(
                ValueError(
                    f"{_RULE}, and {step}. {_IN_ONE_ORDER}; without slices by rank. For data that workers read in "
                    "parts, see tfpar.data.by_file."
                )
            )
        self._has_warned = True
        if self._job.is_chief:
            user_warnings.warn(
                f"{_RULE}, and whether they do is unknown: the batches differ, and random operations may change every "
                f"tensor of them, as in mixup. {_IN_ONE_ORDER}."
            )

    def _is_drawn(self) -> bool:
        return bool(self._digests[:, 0].any())

    def _first_differences(self, own: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the first step of each worker that differs from the chief's, and whether random numbers may be why."""
        chiefs = np.frombuffer(self._job.broadcast(own.tobytes())).reshape(-1, data.NUM_NUMBERS)
        size = min(len(own), len(chiefs))
        is_equal = np.isclose(own[:size], chiefs[:size], _ROUNDING, _ROUNDING).all(1)
        differing = [*np.flatnonzero(~is_equal), *range(size, max(len(own), len(chiefs)))]
        message = np.zeros(self._job.num_workers + 1)
        message[self._job.rank] = self._first + 1 + differing[0] if differing else 0
        message[-1] = own[:, 0].any()
        *steps, num_drawn = self._job.sum(message.tolist())
        return np.where(np.equal(steps, 0), np.inf, steps), num_drawn > 0
