"""Examples in a fixed number of shards, so that a worker reads only its own and every batch stays the same.

Each shard is a pipeline of its own, and a global batch is one piece of each. Workers hold consecutive shards:

    shards        0     1     2     3         one worker, two workers or four: the same rows in the same order
    batch 0    [ a a | d d | g g | j j ]
    batch 1    [ b b | e e | h   | k k ]      shard 2 has ended in the middle of its piece
    batch 2    [ c   | f f |     | l   ]      the epoch ends when all have ended
                 worker 0  |  worker 1        of two workers

So the number of shards fixes the batches, and the number of workers does not (the idea is that of the canonical nodes
of MosaicML's Streaming).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.data.batching.batches import num_rows, take_rows
from tfpar.data.sharding import shard_batches

NUM_SHARDS = 8  # 1, 2, 4 and 8 workers can share it, and one worker can still run as many pipelines


class Sharded:
    """Examples in shards: global batches that do not depend on the number of workers, each worker reading its part.

    Batches become smaller towards the end of an epoch where shards are of unequal size: no example is dropped or
    repeated to fill them up.

    Args:
        make_shard: From the number of a shard to a new data set of its single examples, structured as Keras takes them.
            Whatever is random in it needs a seed, and best one of its own for each shard.
        num_shards: How many shards; a multiple of the number of workers.
        global_batch_size: Examples in one batch over all workers; a multiple of `num_shards`, so that all shards
            advance at the same pace.
        finish: What to do to batches of any number of rows, called as `tf.data.Dataset.map` calls; it treats each row
            for itself. None: nothing.
        change_pieces: `(pieces, shard)` -> pieces, where a piece is the batch of one shard, of up to
            `global_batch_size / num_shards` rows: what is random, but cheaper for many rows at once. None: nothing.

    Raises:
        ValueError: Numbers below 1, a batch that the shards do not divide, or a shard that never ends.
        TypeError: A `make_shard` that returns no data set.

    >>> numbers = Sharded(lambda shard: tf.data.Dataset.range(shard, 7, 2), num_shards=2, global_batch_size=4)
    >>> [batch.numpy().tolist() for batch in numbers.whole()]
    [[0, 2, 1, 3], [4, 6, 5]]
    >>> [(rows.numpy().tolist(), int(count)) for rows, count in numbers.part(1, num_workers=2).take(3)]
    [([1, 3], 2), ([5], 1), ([1], 0)]
    """

    def __init__(
        self,
        make_shard: Callable[[int], tf.data.Dataset],
        num_shards: int,
        global_batch_size: int,
        finish: Callable[..., Any] | None = None,
        change_pieces: Callable[[tf.data.Dataset, int], tf.data.Dataset] | None = None,
    ) -> None:
        if num_shards < 1 or global_batch_size < 1:
            raise ValueError(
                f"num_shards and global_batch_size must be at least 1, but are {num_shards} and {global_batch_size}."
            )
        if global_batch_size % num_shards:
            raise ValueError(
                f"global_batch_size must be a multiple of num_shards, but is {global_batch_size} with {num_shards} "
                f"shards: use {default_num_shards(global_batch_size, num_shards)} shards, or batches of "
                f"{-(-global_batch_size // num_shards) * num_shards}."
            )
        self.num_shards = num_shards
        self.global_batch_size = global_batch_size
        self._make_shard = make_shard
        self._finish = finish
        self._change_pieces = change_pieces
        first = make_shard(0)
        if not isinstance(first, tf.data.Dataset):
            raise TypeError(f"make_shard must return a tf.data.Dataset, but returned {first!r:.60}.")
        if int(first.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ValueError("make_shard must return a data set that ends, but shard 0 never does: leave out repeat().")

    def whole(self) -> tf.data.Dataset:
        """The global batches, as one worker sees them.

        Returns:
            A new data set of batches `[rows, ...]`; it ends exactly, and `tfpar.data.seek` can move it.
        """
        batches = _ready(self._batches(range(self.num_shards)).map(lambda rows, count: rows))
        num_batches = self.cardinality()
        return batches if num_batches < 0 else batches.apply(tf.data.experimental.assert_cardinality(num_batches))

    def part(self, rank: int, num_workers: int) -> tf.data.Dataset:
        """The rows that one worker has of each global batch, in the order of the batches.

        It never ends: a worker whose shards have ended goes on with zero rows, so that it can take part in the steps
        that the others still have. The epoch has ended when no worker has rows. A step needs rows to compute with, so
        a worker without any gets a copy of one example, its own first one if it ever had one, with a count of 0.

        Args:
            rank: Which worker, from 0.
            num_workers: How many workers; a divisor of `num_shards`.

        Returns:
            A new, infinite data set of `(rows, num_rows)`, `num_rows` an int64 scalar; `tfpar.data.seek` can move it.

        Raises:
            ValueError: A number of workers that does not divide the shards, or a rank that is none of theirs.
        """
        if num_workers < 1 or self.num_shards % num_workers:
            raise ValueError(
                f"The number of shards must be a multiple of the number of workers, but {self.num_shards} shards meet "
                f"{num_workers} workers: use another number of shards (data.num_shards), a multiple of {num_workers} "
                f"that divides the global batch size {self.global_batch_size}, or division by batch."
            )
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must lie in 0 to {num_workers - 1} for {num_workers} workers, but is {rank}.")
        shards_each = self.num_shards // num_workers
        own = range(rank * shards_each, (rank + 1) * shards_each)
        return _ready(shard_batches.pad_with_empty_batches(self._batches(own), self._reserve(own)))

    def map(self, change: Callable[..., Any]) -> "Sharded":
        """The same shards with one more thing done to batches, as `tf.data.Dataset.map` does it.

        Args:
            change: Takes a batch of any number of rows, a tuple as several arguments; treats each row for itself.

        >>> numbers = Sharded(lambda shard: tf.data.Dataset.range(2), num_shards=1, global_batch_size=2)
        >>> [batch.numpy().tolist() for batch in numbers.map(tf.negative).whole()]
        [[0, -1]]
        """

        def finish(*rows: Any) -> Any:
            finished = rows if self._finish is None else self._finish(*rows)
            return change(*finished) if isinstance(finished, tuple) else change(finished)

        changes = (self._make_shard, self.num_shards, self.global_batch_size, finish, self._change_pieces)
        return Sharded(*changes)

    def cardinality(self) -> int:
        """How many global batches an epoch has, or `tf.data.UNKNOWN_CARDINALITY`, as `tf.data.Dataset` says it.

        >>> Sharded(lambda shard: tf.data.Dataset.range(5), num_shards=2, global_batch_size=4).cardinality()
        3
        """
        return int(tf.data.UNKNOWN_CARDINALITY) if min(self._num_pieces) < 0 else max(self._num_pieces)

    @property
    def element_spec(self) -> Any:
        """The structure of a global batch, as `tf.data.Dataset` says it."""
        rows, _ = self._batches([0]).element_spec
        return rows

    @functools.cached_property
    def _num_pieces(self) -> tuple[int, ...]:
        return tuple(int(self._pieces(shard).cardinality()) for shard in range(self.num_shards))

    def _pieces(self, shard: int) -> tf.data.Dataset:
        batches = self._make_shard(shard).batch(self.global_batch_size // self.num_shards)
        return batches if self._change_pieces is None else self._change_pieces(batches, shard)

    def _batches(self, shards: Sequence[int]) -> tf.data.Dataset:
        """The joined pieces of some shards as `(rows, count)`, until the last of them has ended."""
        of_shards = [self._pieces(shard) for shard in shards]
        nothing = tf.data.Dataset.from_tensors(shard_batches.no_rows(of_shards[0].element_spec)).repeat()

        def join(*parts: Any) -> tuple[Any, tf.Tensor]:
            rows = shard_batches.join(parts)
            return rows, num_rows(rows)

        # The iterators of all shards are made with that of the whole: seek rests on it.
        joined = tf.data.Dataset.zip(tuple(of_shard.concatenate(nothing) for of_shard in of_shards))
        batches = joined.map(join, num_parallel_calls=tf.data.AUTOTUNE).take_while(lambda rows, count: count > 0)
        if self._finish is None:
            return batches
        return batches.map(lambda rows, count: (self._finished(rows), count), num_parallel_calls=tf.data.AUTOTUNE)

    def _finished(self, rows: Any) -> Any:
        if self._finish is None:
            return rows
        return self._finish(*rows) if isinstance(rows, tuple) else self._finish(rows)

    def _reserve(self, own: Sequence[int]) -> tf.data.Dataset | None:
        """One example of the other shards; None where there are none, or where the own shards are known to hold one."""
        others = [self._pieces(shard) for shard in range(self.num_shards) if shard not in own]
        if not others or any(self._num_pieces[shard] > 0 for shard in own):
            return None
        example = functools.reduce(lambda first, second: first.concatenate(second), others).take(1)
        # One element as a tuple of one, so that map does not take it apart.
        return tf.data.Dataset.zip((example,)).map(lambda rows: self._finished(take_rows(rows, 0, 1)))


def default_num_shards(global_batch_size: int, most: int = NUM_SHARDS) -> int:
    """The largest number of shards, up to `most`, that divides the global batch.

    >>> default_num_shards(64), default_num_shards(60), default_num_shards(7)
    (8, 6, 7)
    """
    return max(number for number in range(1, most + 1) if global_batch_size % number == 0)


def _ready(batches: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def first_batches(dataset: tf.data.Dataset | Sharded, num_batches: int | None) -> tf.data.Dataset | Sharded:
    """The first batches of an epoch.

    Args:
        dataset: Global batches.
        num_batches: How many; None: all, and the dataset as it is.

    >>> [int(batch) for batch in first_batches(tf.data.Dataset.range(9), 2)]
    [0, 1]
    """
    if num_batches is None:
        return dataset
    return (dataset.whole() if isinstance(dataset, Sharded) else dataset).take(num_batches)
