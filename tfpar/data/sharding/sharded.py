"""Examples in a fixed number of shards: each worker reads only its own shards, and the global batches stay the same.

Each shard has its own input pipeline, and a global batch is one batch of each shard. Workers read consecutive shards:

    shards        0     1     2     3         one worker, two workers or four: the same rows in the same order
    batch 0    [ a a | d d | g g | j j ]
    batch 1    [ b b | e e | h   | k k ]      the last batch of shard 2 is smaller
    batch 2    [ c   | f f |     | l   ]      the epoch ends when all shards have ended
                 worker 0  |  worker 1        of two workers

The batches depend on the number of shards, not on the number of workers, as with the canonical nodes of MosaicML's
Streaming.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.data.batching.batches import num_rows, take_rows
from tfpar.data.sharding import shard_batches

NUM_SHARDS = 8  # divisible by 1, 2, 4 and 8 workers; few enough input pipelines for one worker


class Sharded:
    """Global batches in shards. They do not depend on the number of workers, each of which reads its own shards.

    If the shards have unequal sizes, batches become smaller towards the end of an epoch: no example is dropped or
    repeated.

    Args:
        make_shard: Function from the number of a shard to a new dataset of its single examples. Random operations in it
            need a seed, preferably a different one for each shard.
        num_shards: Number of shards; a multiple of the number of workers.
        global_batch_size: Examples in one batch over all workers; a multiple of `num_shards`.
        finish: Function for `tf.data.Dataset.map` on batches of any number of rows; it must compute each row from that
            row alone. None leaves the batches unchanged.
        change_batches: Function `(batches, shard)` that transforms the dataset of one shard's batches, of up to
            `global_batch_size / num_shards` rows, for random changes that are cheaper for many rows at once. None
            leaves them unchanged.
        source: What the shards are read from, such as file names, one per line. Workers with different sources are
            refused; "" compares nothing.

    Raises:
        ValueError: If a number is below 1, `global_batch_size` is not a multiple of `num_shards`, or a shard is
            infinite.
        TypeError: If `make_shard` does not return a dataset.

    >>> numbers = Sharded(lambda shard: tf.data.Dataset.range(shard, 7, 2), num_shards=2, global_batch_size=4)
    >>> [batch.numpy().tolist() for batch in numbers.global_batches()]
    [[0, 2, 1, 3], [4, 6, 5]]
    >>> [(rows.numpy().tolist(), int(count)) for rows, count in numbers.local_batches(1, num_workers=2).take(3)]
    [([1, 3], 2), ([5], 1), ([1], 0)]
    """

    def __init__(
        self,
        make_shard: Callable[[int], tf.data.Dataset],
        num_shards: int,
        global_batch_size: int,
        finish: Callable[..., Any] | None = None,
        change_batches: Callable[[tf.data.Dataset, int], tf.data.Dataset] | None = None,
        source: str = "",
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
        self.source = source
        self._make_shard = make_shard
        self._finish = finish
        self._change_batches = change_batches
        self._num_batches: dict[int, int] = {}  # by shard, of an epoch
        first = make_shard(0)
        if not isinstance(first, tf.data.Dataset):
            raise TypeError(f"make_shard must return a tf.data.Dataset, but returned {first!r:.60}.")
        if int(first.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ValueError("make_shard must return a finite dataset, but shard 0 is infinite: leave out repeat().")

    def global_batches(self) -> tf.data.Dataset:
        """Return a new dataset of the global batches of one epoch; `tfpar.data.seek` can move it."""
        shards = self._shards(range(self.num_shards))
        batches = _ready(self._batches(shards).map(lambda rows, count: rows))
        num_batches = self.cardinality()
        return batches if num_batches < 0 else batches.apply(tf.data.experimental.assert_cardinality(num_batches))

    def local_batches(self, rank: int, num_workers: int, batch_shares: Sequence[int] | None = None) -> tf.data.Dataset:
        """Return the local batches of one worker, in the order of the global batches.

        The dataset is infinite: after the end of its shards, a worker gets padding batches until no worker has rows,
        which ends the epoch. A padding batch is a copy of one example, the worker's first if it has any, with a count
        of 0.

        Args:
            rank: The rank of the worker, from 0.
            num_workers: Number of workers, a divisor of `num_shards`.
            batch_shares: Relative number of shards of each worker; their sum must divide `num_shards`, after division
                by their common factor. None for equally many.

        Returns:
            A new dataset of `(rows, num_rows)`, `num_rows` an int64 scalar; `tfpar.data.seek` can move it.

        Raises:
            ValueError: If `num_shards` is not a multiple of `num_workers` or of the sum of the shares, or `rank` is out
                of range.
        """
        is_equal = batch_shares is None or len({*batch_shares}) == 1
        if num_workers < 1 or (is_equal and self.num_shards % num_workers):
            raise ValueError(
                f"The number of shards must be a multiple of the number of workers, but there are {self.num_shards} "
                f"shards and {num_workers} workers: use another number of shards (data.num_shards), a multiple of "
                f"{num_workers} that divides the global batch size {self.global_batch_size}, or sharding by batch."
            )
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must be from 0 to {num_workers - 1} for {num_workers} workers, but is {rank}.")
        own = self._shards_of(rank, batch_shares or (1,) * num_workers)
        return _ready(shard_batches.pad_with_empty_batches(self._batches(self._shards(own)), self._reserve(own)))

    def _shards_of(self, rank: int, shares: Sequence[int]) -> range:
        parts = [share // math.gcd(*shares) for share in shares]
        if self.num_shards % sum(parts):
            raise ValueError(
                f"The number of shards must divide as the batch shares of the workers, {' : '.join(map(str, parts))}, "
                f"but there are {self.num_shards} shards: use another number of shards (data.num_shards), a multiple "
                f"of {sum(parts)} that divides the global batch size {self.global_batch_size}, or sharding by batch."
            )
        each = self.num_shards // sum(parts)
        return range(each * sum(parts[:rank]), each * sum(parts[: rank + 1]))

    def map(self, change: Callable[..., Any]) -> "Sharded":
        """Return the same shards with a function applied to batches, as by `tf.data.Dataset.map`.

        Args:
            change: Function of a batch of any number of rows; it must compute each row from that row alone.

        >>> numbers = Sharded(lambda shard: tf.data.Dataset.range(2), num_shards=1, global_batch_size=2)
        >>> [batch.numpy().tolist() for batch in numbers.map(tf.negative).global_batches()]
        [[0, -1]]
        """

        def finish(*rows: Any) -> Any:
            finished = rows if self._finish is None else self._finish(*rows)
            return change(*finished) if isinstance(finished, tuple) else change(finished)

        changes = (self._make_shard, self.num_shards, self.global_batch_size, finish, self._change_batches, self.source)
        return Sharded(*changes)

    def cardinality(self) -> int:
        """Return the number of global batches in an epoch, or `tf.data.UNKNOWN_CARDINALITY`.

        >>> Sharded(lambda shard: tf.data.Dataset.range(5), num_shards=2, global_batch_size=4).cardinality()
        3
        """
        num_batches = [self._num_batches_of(shard) for shard in range(self.num_shards)]
        return int(tf.data.UNKNOWN_CARDINALITY) if min(num_batches) < 0 else max(num_batches)

    @property
    def element_spec(self) -> Any:
        """The structure of a global batch, as in `tf.data.Dataset.element_spec`."""
        rows, _ = self._batches(self._shards([0])).element_spec
        return rows

    def _num_batches_of(self, shard: int) -> int:
        if shard not in self._num_batches:
            self._shards([shard])
        return self._num_batches[shard]

    def _shards(self, shards: Sequence[int]) -> list[tf.data.Dataset]:
        """Return new datasets of the batches of some shards, so that shuffling starts again from the seed."""
        datasets = []
        for shard in shards:
            batches = self._make_shard(shard).batch(self.global_batch_size // self.num_shards)
            datasets.append(batches if self._change_batches is None else self._change_batches(batches, shard))
            self._num_batches[shard] = int(datasets[-1].cardinality())
        return datasets

    def _batches(self, shards: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
        """Return the joined batches of some shards as `(rows, count)`, until the last shard ends."""
        nothing = tf.data.Dataset.from_tensors(shard_batches.no_rows(shards[0].element_spec)).repeat()

        def join(*parts: Any) -> tuple[Any, tf.Tensor]:
            rows = shard_batches.join(parts)
            return rows, num_rows(rows)

        # Creating an iterator of the joined dataset creates those of all shards: seek relies on it.
        joined = tf.data.Dataset.zip(tuple(shard.concatenate(nothing) for shard in shards))
        batches = joined.map(join, num_parallel_calls=tf.data.AUTOTUNE).take_while(lambda rows, count: count > 0)
        if self._finish is None:
            return batches
        return batches.map(lambda rows, count: (self._finished(rows), count), num_parallel_calls=tf.data.AUTOTUNE)

    def _finished(self, rows: Any) -> Any:
        if self._finish is None:
            return rows
        return self._finish(*rows) if isinstance(rows, tuple) else self._finish(rows)

    def _reserve(self, own: Sequence[int]) -> tf.data.Dataset | None:
        """Return a dataset of one example of the other shards; None if the own shards are not empty."""
        others = [shard for shard in range(self.num_shards) if shard not in own]
        if not others or any(self._num_batches_of(shard) > 0 for shard in own):
            return None
        example = functools.reduce(lambda first, second: first.concatenate(second), self._shards(others)).take(1)
        # In a tuple, because map would unpack an example that is one.
        return tf.data.Dataset.zip((example,)).map(lambda rows: self._finished(take_rows(rows, 0, 1)))


def default_num_shards(global_batch_size: int, limit: int = NUM_SHARDS) -> int:
    """Return the largest number of shards, up to `limit`, that divides the global batch.

    >>> default_num_shards(64), default_num_shards(60), default_num_shards(7)
    (8, 6, 7)
    """
    return max(number for number in range(1, limit + 1) if global_batch_size % number == 0)


def _ready(batches: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def first_batches(dataset: tf.data.Dataset | Sharded, num_batches: int | None) -> tf.data.Dataset | Sharded:
    """Return the first `num_batches` global batches of an epoch; None returns the dataset unchanged.

    >>> [int(batch) for batch in first_batches(tf.data.Dataset.range(9), 2)]
    [0, 1]
    """
    if num_batches is None:
        return dataset
    return (dataset.global_batches() if isinstance(dataset, Sharded) else dataset).take(num_batches)
