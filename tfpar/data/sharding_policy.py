"""The sharding of the training examples, as set or as selected by "auto", with the reason.

It does not depend on the number of workers, so that the batches are the same for any number.
"""

from typing import Literal, NamedTuple

import tensorflow as tf

from tfpar import config
from tfpar.data.sharding.sharded import NUM_SHARDS, default_num_shards
from tfpar.data.sources.split import Split

# From about this size on, decoding takes some 100 microseconds, several times as long as reading.
COSTLY_PIXELS = 128 * 128

ALL_READ = "every worker reads all examples and takes its local batch of each global batch"


class ShardingPolicy(NamedTuple):
    """The kind of sharding, the number of shards (1 for "batch"), and an explanation for the user."""

    kind: Literal["file", "example", "batch"]
    num_shards: int
    sentence: str


def sharding_policy(settings: config.Data, split: Split, global_batch_size: int) -> ShardingPolicy:
    """Return the sharding policy of a training split.

    "auto" selects "batch", which is always possible, unless images of at least 128 x 128 pixels must be decoded. For
    these it selects "file" if all shards can have equally many files, else "example".

    Args:
        settings: Uses `shard_by` and `num_shards`.
        split: The training split.
        global_batch_size: Examples in one batch over all workers.

    Raises:
        ValueError: If the shards do not divide the global batch, or there are more shards than files.
    """
    num_shards = settings.num_shards or default_num_shards(global_batch_size)
    if settings.shard_by == "batch":
        return ShardingPolicy("batch", 1, f"by batch, as set: {ALL_READ}")
    if settings.shard_by == "auto":
        return _automatic(split, num_shards, global_batch_size)
    _check_divides(num_shards, global_batch_size)
    if settings.shard_by == "file":
        if split.num_files < num_shards:
            raise ValueError(
                f'data.shard_by = "file" needs a file for each of {num_shards} shards, but the {split.origin} has '
                f'{split.num_files}: set data.num_shards to at most that, or data.shard_by to "example".'
            )
        return ShardingPolicy("file", num_shards, f"by file, as set: {_by_file(split, num_shards)}")
    return ShardingPolicy("example", num_shards, f"by example, as set: {_by_example(num_shards)}")


def _automatic(split: Split, num_shards: int, global_batch_size: int) -> ShardingPolicy:
    shape = split.decoded().element_spec[0].shape if split.encoded else tf.TensorShape(None)
    if shape.rank != 3 or shape[0] * shape[1] < COSTLY_PIXELS:
        return ShardingPolicy("batch", 1, f"by batch, because decoding one example is cheap: {ALL_READ}")
    size = f"{shape[0]} x {shape[1]}"
    if num_shards == 1 or global_batch_size % num_shards:
        why = f"because {num_shards} shards do not divide a global batch of {global_batch_size}"
        if num_shards == 1:
            why = f"because no number of shards from 2 to {NUM_SHARDS} divides a global batch of {global_batch_size}"
        return ShardingPolicy("batch", 1, f"by batch, {why}: {ALL_READ}")
    if split.num_files % num_shards == 0:
        return ShardingPolicy(
            "file", num_shards, f"by file, because images of {size} must be decoded: {_by_file(split, num_shards)}"
        )
    why = f"because images of {size} must be decoded and {split.num_files} files do not fill {num_shards} shards evenly"
    return ShardingPolicy("example", num_shards, f"by example, {why}: {_by_example(num_shards)}")


def _check_divides(num_shards: int, global_batch_size: int) -> None:
    if global_batch_size % num_shards:
        raise ValueError(
            f"The global batch must be a multiple of the number of shards, but training.global_batch_size = "
            f"{global_batch_size} and data.num_shards = {num_shards}: set data.num_shards = "
            f"{default_num_shards(global_batch_size, num_shards)}, or training.global_batch_size = "
            f"{-(-global_batch_size // num_shards) * num_shards}."
        )


def _by_file(split: Split, num_shards: int) -> str:
    even = "" if split.num_files % num_shards == 0 else ", unevenly, so that the last batches of an epoch are smaller"
    return f"{split.num_files} files in {num_shards} shards{even}, and a worker reads only its own"


def _by_example(num_shards: int) -> str:
    return f"{num_shards} shards of examples, and a worker decodes only its own"
