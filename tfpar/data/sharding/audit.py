"""The audit: count the examples and steps of each worker before training, and find duplicated and dropped examples."""

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
    """The examples that a job reads in one epoch, compared with those of one worker alone; `str` formats a table."""

    examples_per_worker: tuple[int, ...]
    steps_per_worker: tuple[int, ...]
    num_examples: int  # read by one worker alone
    num_equal: int  # of these, how many are equal to an earlier one, in every part
    num_duplicates: int  # read more often than by one worker alone
    num_dropped: int  # read by one worker alone, but not by the job, or less often
    num_unknown: int  # read by the job, but not by one worker alone
    first_examples: tuple[str, ...]  # the first few duplicates and drops, as text

    @property
    def ok(self) -> bool:
        """Whether the workers together read exactly the examples of one worker alone."""
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
    """Read one epoch as each worker would, and compare it with the epoch of one worker alone.

    Examples are compared by their content, labels and weights included. Their order does not matter, so shuffling alone
    changes nothing. Random augmentation does: seed it, or audit the data without it. A shuffle without a seed, followed
    by `shard`, gives other examples on every worker.

    With a dataset of global batches, every worker reads all batches and takes its rows of each. Such a dataset is read
    once, so the audit does not detect a worker that shuffles in another order. A `Sharded` is read in its parts and as
    a whole. A function is called once for each worker and once for one worker alone.

    All data are read about twice, and once more in part after an error. Memory: about 16 bytes per example.

    Args:
        dataset: A dataset of global batches, a `Sharded`, or a function from `tf.distribute.InputContext` to the
            batches of one worker, as `tf.distribute.Strategy.distribute_datasets_from_function` takes it.
        num_workers: Number of workers.

    Returns:
        The counts; print it, or look at `ok`.

    Raises:
        ValueError: A number of workers below 1, or one that does not divide the shards; an infinite dataset.
        TypeError: Another kind of input.

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
    """Audit a dataset that all workers read in full: one pass gives the examples of all workers."""
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
    num_steps = max(steps for _, steps in read)  # a worker runs all steps, also those in which it has no rows
    digests = [digests for digests, _ in read]
    return _compare(digests, [num_steps] * num_workers, lambda: without_autotuning(sharded.global_batches()))


def _compare(read: list[Digests], steps: list[int], whole: Callable[[], Iterable[Any]]) -> Audit:
    alone, _ = _digests(whole())
    contents, positions = np.unique(np.concatenate([alone, *read]), return_inverse=True)
    counts_alone = np.bincount(positions[: len(alone)], minlength=len(contents))
    excess = np.bincount(positions[len(alone) :], minlength=len(contents)) - counts_alone
    known = counts_alone > 0
    names = {contents[place]: "missing" for place in np.flatnonzero(excess < 0)}
    names |= {contents[place]: "too many" for place in np.flatnonzero((excess > 0) & known)}
    return Audit(
        examples_per_worker=tuple(len(digests) for digests in read),
        steps_per_worker=tuple(steps),
        num_examples=len(alone),
        num_equal=_num_equal(alone),
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
