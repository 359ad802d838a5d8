"""A check at every vote that all workers read the same global batches, of which each takes its local batch.

    worker 0   steps read a b │ digest of both ─┐
                              │                 ├─ vote: equal, or the workers find the first step that differs
    worker 1   steps read a c │ digest of both ─┘

Workers that read in different orders would train on some examples twice, and never on others.
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
_ROUNDING = 1e-6  # relative, between different models of processors


class ReadOrder:
    """The digests of the global batches that this worker has read since the last vote."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first, self._digests = 0, np.zeros([0, data.NUM_NUMBERS])
        self._has_warned = False

    def note(self, first: int, digests: Any) -> None:
        """Store the digests of some steps for the vote.

        Args:
            first: The index of the first step in its epoch.
            digests: `[steps, numbers]`; None or empty if the workers do not read the same batches.
        """
        rows = np.asarray([] if digests is None else digests, "float64")
        self._first, self._digests = first, rows.reshape(-1, data.NUM_NUMBERS)

    def summaries(self) -> list[float]:
        """Return a digest for each worker, to be summed over all workers: that of this worker, 0 for the others."""
        summaries = [0.0] * self._job.num_workers
        if not (self._has_warned and self._is_random()):
            content = hashlib.blake2b(self._digests.tobytes(), digest_size=_SUMMARY_BYTES).digest()
            summaries[self._job.rank] = float(int.from_bytes(content))
        return summaries

    def compare(self, summaries: np.ndarray) -> None:
        """Raise an error if workers have read different batches; all workers must call this.

        Where random numbers change every tensor of a batch, as in mixup, warn once instead.

        Args:
            summaries: The result of `summaries`, summed over all workers.

        Raises:
            ValueError: If a worker has read other batches than the chief; on every worker.
        """
        own, self._digests = self._digests, self._digests[:0]
        if len(set(summaries)) == 1:
            return
        steps, is_random = self._first_differences(own)
        rank = min(range(len(steps)), key=lambda rank: steps[rank])
        if steps[rank] == np.inf:  # they differ by rounding only
            return
        if not is_random:
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

    def _is_random(self) -> bool:
        return bool(self._digests[:, 0].any())

    def _first_differences(self, own: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return each worker's first step that differs from the chief's, and whether random operations may be why."""
        chiefs = np.frombuffer(self._job.broadcast(own.tobytes())).reshape(-1, data.NUM_NUMBERS)
        size = min(len(own), len(chiefs))
        is_equal = np.isclose(own[:size], chiefs[:size], _ROUNDING, _ROUNDING).all(1)
        differing = [*np.flatnonzero(~is_equal), *range(size, max(len(own), len(chiefs)))]
        message = np.zeros(self._job.num_workers + 1)
        message[self._job.rank] = self._first + 1 + differing[0] if differing else 0
        message[-1] = own[:, 0].any()
        *steps, num_random = self._job.sum(message.tolist())
        return np.where(np.equal(steps, 0), np.inf, steps), num_random > 0
