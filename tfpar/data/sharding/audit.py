"""Audit sharding before training: count the examples of each worker, and find duplicated and dropped ones."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfpar.data.batching.autotuning import without_autotuning
from tfpar.data.batching.batches import split_batch
from tfpar.data.sharding.row_digests import DIGEST_BYTES, in_words, row_digests
from tfpar.data.sharding.sharded import Sharded

NUM_SHOWN = 3

Digests = npt.NDArray[np.bytes_]
FromContext = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class Audit(NamedTuple):
    """The examples that a job reads in one epoch, compared with those of a single worker; `print` shows a table."""

    examples_per_worker: tuple[int, ...]
    steps_per_worker: tuple[int, ...]
    num_examples: int  # read by a single worker
    num_equal: int  # of these, how many are equal to an earlier one
    num_duplicates: int  # read by the job in excess of a single worker
    num_dropped: int  # read by the job less often than by a single worker, or never
    num_unknown: int  # read by the job only
    first_examples: tuple[str, ...]  # the first few duplicated and dropped examples, as text

    @property
    def ok(self) -> bool:
        """Whether the workers together read exactly the examples of a single worker."""
        return not (self.num_duplicates or self.num_dropped or self.num_unknown)

    def __str__(self) -> str:
        lines = [f"{'worker':>10}{'examples':>12}{'steps':>10}"]
        for rank, (examples, steps) in enumerate(zip(self.examples_per_worker, self.steps_per_worker, strict=True)):
            lines.append(f"{rank:>10}{examples:>12,}{steps:>10,}")
        lines.append(f"{'together':>10}{sum(self.examples_per_worker):>12,}")
        lines.append(f"{'one alone':>10}{self.num_examples:>12,}")
        return "\n".join([*lines, *self._findings()])

    def _findings(self) -> Iterator[str]:
        if self.ok:
            yield "Right: all workers together read the examples of one worker alone, each as often."
        if self.num_duplicates:
            yield f"WRONG: {self.num_duplicates:,} examples are read in excess of what one worker alone reads."
        if self.num_dropped:
            yield f"WRONG: {self.num_dropped:,} examples that one worker alone reads are dropped."
        if self.num_unknown:
            yield (
                f"WRONG: {self.num_unknown:,} examples differ from all that one worker alone reads: is a random "
                "operation without a seed, or does padding depend on the batch?"
            )
        yield from (f"    {example}" for example in self.first_examples)
        if len(set(self.steps_per_worker)) > 1:
            yield "Note: the workers take different numbers of steps, so some must wait at the end of an epoch."
        if self.num_equal:
            yield f"Note: {self.num_equal:,} examples equal an earlier one: does the dataset contain them on purpose?"


def audit(dataset: tf.data.Dataset | Sharded | FromContext, num_workers: int) -> Audit:
    """Read one epoch as each worker would, and compare it with the epoch of a single worker.

    Examples are compared by content, with labels and weights, in any order. Seed random augmentation, or audit the data
    without it. A typical mistake that the audit finds is a shuffle without a seed before `shard`, which gives the
    workers overlapping examples.

    A dataset of global batches is read once, because every worker reads all batches and takes its rows; the audit does
    not detect workers that shuffle in different orders. A `Sharded` is read shard by shard and as a whole. A function
    is called for each worker of the job, and for a single worker.

    All data are read about twice, and in part once more to show wrong examples. Memory: about 16 bytes per example.

    Args:
        dataset: A dataset of global batches; a `Sharded`; or a function of `tf.distribute.InputContext` that returns
            the batches of one worker, as for `tf.distribute.Strategy.distribute_datasets_from_function`.
        num_workers: Number of workers.

    Returns:
        The counts: print them, or check `ok`.

    Raises:
        ValueError: If `num_workers` is below 1 or does not divide the number of shards, or the dataset is infinite.
        TypeError: If `dataset` is something else.

    >>> def same_for_all(context):
    ...     return tf.data.Dataset.range(4).batch(2)
    >>> print(audit(same_for_all, num_workers=2))
        worker    examples     steps
             0           4         2
             1           4         2
      together           8
     one alone           4
    WRONG: 4 examples are read in excess of what one worker alone reads.
        too many: 0
        too many: 1
        too many: 2
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, but is {num_workers}.")
    if isinstance(dataset, tf.data.Dataset):
        return _audit_batches(dataset, num_workers)
    if isinstance(dataset, Sharded):
        return _audit_sharded(dataset, num_workers)
    if not callable(dataset):
        raise TypeError(
            "audit takes a tf.data.Dataset of global batches, a tfpar.data.Sharded, or a function of "
            f"tf.distribute.InputContext, received {dataset!r:.60}."
        )
    make: FromContext = dataset
    read = [_digests(_finite(make(_context(rank, num_workers)))) for rank in range(num_workers)]
    steps = [num_steps for _, num_steps in read]
    return _compare([digests for digests, _ in read], steps, lambda: _finite(make(_context(0, 1))))


def _context(rank: int, num_workers: int) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(num_workers, rank, num_workers)


def _finite(dataset: tf.data.Dataset) -> tf.data.Dataset:
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError("audit reads one epoch to its end, but this dataset has none: leave out repeat().")
    return without_autotuning(dataset)


def _audit_batches(dataset: tf.data.Dataset, num_workers: int) -> Audit:
    """Audit a dataset that every worker reads in full, in one pass for all workers."""
    digests: list[bytearray] = [bytearray() for _ in range(num_workers)]
    num_steps = 0
    for batch in _finite(dataset):
        num_steps += 1
        rows = tf.constant(list(row_digests(batch)), tf.string)
        for part, own in zip(split_batch(rows, num_workers), digests, strict=True):
            own += b"".join(part.numpy().tolist())
    shares = [_as_array(own) for own in digests]
    return Audit(
        examples_per_worker=tuple(len(share) for share in shares),
        steps_per_worker=(num_steps,) * num_workers,
        num_examples=sum(len(share) for share in shares),
        num_equal=_num_equal(np.concatenate(shares)),
        num_duplicates=0,
        num_dropped=0,
        num_unknown=0,
        first_examples=(),
    )


def _audit_sharded(sharded: Sharded, num_workers: int) -> Audit:
    def own_batches(rank: int) -> Iterator[Any]:
        for rows, count in without_autotuning(sharded.local_batches(rank, num_workers)):
            if count == 0:
                return
            yield rows

    read = [_digests(own_batches(rank)) for rank in range(num_workers)]
    num_steps = max(steps for _, steps in read)  # a worker runs all steps, even without rows
    digests = [digests for digests, _ in read]
    return _compare(digests, [num_steps] * num_workers, lambda: without_autotuning(sharded.global_batches()))


def _compare(read: list[Digests], steps: list[int], whole: Callable[[], Iterable[Any]]) -> Audit:
    expected, _ = _digests(whole())
    contents, positions = np.unique(np.concatenate([expected, *read]), return_inverse=True)
    expected_counts = np.bincount(positions[: len(expected)], minlength=len(contents))
    excess = np.bincount(positions[len(expected) :], minlength=len(contents)) - expected_counts
    known = expected_counts > 0
    names = {contents[index]: "missing" for index in np.flatnonzero(excess < 0)}
    names |= {contents[index]: "too many" for index in np.flatnonzero((excess > 0) & known)}
    return Audit(
        examples_per_worker=tuple(len(digests) for digests in read),
        steps_per_worker=tuple(steps),
        num_examples=len(expected),
        num_equal=_num_equal(expected),
        num_duplicates=int(excess[(excess > 0) & known].sum()),
        num_dropped=int(-excess[excess < 0].sum()),
        num_unknown=int(excess[~known].sum()),
        first_examples=tuple(_first(names, whole())) if names else (),
    )


def _num_equal(digests: Digests) -> int:
    return len(digests) - len(np.unique(digests))


def _digests(batches: Iterable[Any]) -> tuple[Digests, int]:
    digests, num_steps = bytearray(), 0
    for batch in batches:
        digests += b"".join(row_digests(batch))
        num_steps += 1
    return _as_array(digests), num_steps


def _as_array(digests: bytearray) -> Digests:
    return np.frombuffer(bytes(digests), dtype=f"S{DIGEST_BYTES}")


def _first(names: dict[bytes, str], batches: Iterable[Any]) -> Iterator[str]:
    """Yield the first few examples whose digest is in `names`, as text."""
    shown: set[bytes] = set()
    for batch in batches:
        for row, digest in enumerate(map(bytes, np.array(list(row_digests(batch)), dtype=f"S{DIGEST_BYTES}"))):
            if digest in names and digest not in shown:
                shown.add(digest)
                yield f"{names[digest]}: {in_words(batch, row)}"
            if len(shown) == NUM_SHOWN:
                return
