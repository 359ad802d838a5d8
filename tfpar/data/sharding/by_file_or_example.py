"""Sharding by file and by example."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.cluster.cores import num_allowed_cores
from tfpar.data.batching.autotuning import without_autotuning
from tfpar.data.sharding.row_digests import row_digests
from tfpar.data.sharding.sharded import NUM_SHARDS, Sharded

_FILES_PER_SHARD_AT_ONCE = 4
_BLOCK_EXAMPLES = 16
NUM_COMPARED = 8


def by_file(
    files: Sequence[str | Path],
    read_file: Callable[[tf.Tensor], tf.data.Dataset],
    *,
    global_batch_size: int,
    num_shards: int = NUM_SHARDS,
    shuffle_buffer: int = 0,
    seed: int = 0,
    decode: Callable[..., Any] | None = None,
    finish: Callable[..., Any] | None = None,
) -> Sharded:
    """Shard a dataset by file, so that each worker opens only its own files.

    Shard s reads files s, s + num_shards, ... Use several files of about the same size for each worker: if a shard is
    smaller, the batches after its end are smaller too.

    Args:
        files: All files, in the same order on every worker.
        read_file: Function from a file name (a string scalar) to a dataset of stored examples, such as
            `tf.data.TFRecordDataset`.
        global_batch_size: Examples in one batch over all workers; a multiple of `num_shards`.
        num_shards: Number of shards, at most the number of files; a multiple of the number of workers.
        shuffle_buffer: Number of examples in the shuffle buffers of all shards together; 0 keeps the order.
        seed: Seed of the order.
        decode: Function for `tf.data.Dataset.map` that decodes a stored example; None if it needs no decoding.
        finish: As for `Sharded`.

    Raises:
        ValueError: If there are fewer files than shards, or `Sharded` refuses the numbers.

    >>> lines = by_file(["/a", "/b"], tf.data.Dataset.from_tensors, global_batch_size=2, num_shards=2)
    >>> [batch.numpy().tolist() for batch in lines.global_batches()]
    [[b'/a', b'/b']]
    """
    if len(files) < num_shards:
        raise ValueError(
            f"Sharding by file needs at least one file for each shard, but there are {len(files)} files and "
            f"{num_shards} shards: use fewer shards, write more files, or shard by example."
        )
    names = [str(file) for file in files]

    def stored(shard: int) -> tf.data.Dataset:
        own = names[shard::num_shards]
        return tf.data.Dataset.from_tensor_slices(own).interleave(
            read_file,
            cycle_length=min(_FILES_PER_SHARD_AT_ONCE, len(own)),
            block_length=_BLOCK_EXAMPLES,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    source = "\n".join(Path(name).name for name in names)  # folders may differ between machines
    return _shuffled(stored, num_shards, global_batch_size, shuffle_buffer, seed, decode, finish, source)


def by_example(
    dataset: tf.data.Dataset,
    *,
    global_batch_size: int,
    num_shards: int = NUM_SHARDS,
    shuffle_buffer: int = 0,
    seed: int = 0,
    decode: Callable[..., Any] | None = None,
    finish: Callable[..., Any] | None = None,
) -> Sharded:
    """Shard a dataset by example, so that each worker decodes only its own examples.

    Shard s takes examples s, s + num_shards, ... before shuffling and decoding. Use it if decoding costs much more than
    reading: every shard reads all of `dataset`, and discards the examples of the others. The sizes of the shards differ
    by at most one.

    Args:
        dataset: Single stored examples that are cheap to read, in the same order in every pass, without a shuffle.
        global_batch_size: Examples in one batch over all workers; a multiple of `num_shards`.
        num_shards: Number of shards; a multiple of the number of workers.
        shuffle_buffer: Number of examples in the shuffle buffers of all shards together; 0 keeps the order.
        seed: Seed of the order.
        decode: Function for `tf.data.Dataset.map` that decodes a stored example; None if it needs no decoding.
        finish: As for `Sharded`.

    Raises:
        ValueError: If a second pass begins with other examples, or `Sharded` refuses the numbers.

    >>> numbers = by_example(tf.data.Dataset.range(5), global_batch_size=4, num_shards=2, decode=lambda n: n * 10)
    >>> [batch.numpy().tolist() for batch in numbers.global_batches()]
    [[0, 20, 10, 30], [40]]
    """
    source = _first_examples(dataset)

    def stored(shard: int) -> tf.data.Dataset:
        return dataset.shard(num_shards, shard)

    return _shuffled(stored, num_shards, global_batch_size, shuffle_buffer, seed, decode, finish, source)


def _first_examples(dataset: tf.data.Dataset) -> str:
    """Return digests of the first examples; refuse a random order, in which shards would overlap and miss examples."""
    if not begins_alike(dataset):
        raise ValueError(
            "Sharding by example reads the dataset once for each shard, in the same order, but two passes over it "
            "begin differently: leave out shuffle and random changes, and set shuffle_buffer or make seeded changes "
            "in decode."
        )
    batches = list(without_autotuning(dataset.take(NUM_COMPARED).batch(1)))
    return "\n".join(digest.hex() for batch in batches for digest in row_digests(batch))


def begins_alike(dataset: tf.data.Dataset) -> bool:
    """Return whether two passes over a dataset begin with the same elements.

    >>> begins_alike(tf.data.Dataset.range(9)), begins_alike(tf.data.Dataset.range(999).shuffle(999))
    (True, False)
    """
    for elements in zip(*(without_autotuning(dataset.take(NUM_COMPARED)) for _ in range(2)), strict=True):
        first, again = (tf.nest.flatten(element, expand_composites=True) for element in elements)
        for leaf, other in zip(first, again, strict=True):
            if leaf is not None and not np.array_equal(leaf, other, equal_nan=leaf.dtype.is_floating):
                return False
    return True


def _shuffled(
    stored: Callable[[int], tf.data.Dataset],
    num_shards: int,
    global_batch_size: int,
    shuffle_buffer: int,
    seed: int,
    decode: Callable[..., Any] | None,
    finish: Callable[..., Any] | None,
    source: str,
) -> Sharded:
    traced = None if decode is None else tf.function(decode)  # once for all shards

    def make_shard(shard: int) -> tf.data.Dataset:
        dataset = stored(shard)
        if shuffle_buffer:
            dataset = dataset.shuffle(-(-shuffle_buffer // num_shards), seed=seed + shard)
        return dataset if traced is None else dataset.map(traced, num_parallel_calls=num_allowed_cores())

    return Sharded(make_shard, num_shards, global_batch_size, finish, source=source)
