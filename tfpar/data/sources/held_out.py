"""Hold out validation examples by a hash, so that they are the same on every machine and in every run."""

import hashlib
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from tfpar import config
from tfpar.data.sources.split import Split

Part = Literal["all", "train", "validation"]  # of a split with a validation share
NUM_BUCKETS = 1_000_000


def train_and_validation(settings: config.Data, read: Callable[[str, Part], Split]) -> tuple[Split, Split | None]:
    """Return the training and validation examples: two splits, or two parts of one.

    Args:
        settings: Uses `train_split`, `validation_split` and `validation_share`.
        read: Returns a part of a split, given its name.
    """
    if settings.validation_share is not None:
        return read(settings.train_split, "train"), read(settings.train_split, "validation")
    validation = settings.validation_split
    return read(settings.train_split, "all"), None if validation is None else read(validation, "all")


def in_part(indices: tf.Tensor, origin: str | tf.Tensor, part: Part, share: float | None) -> tf.Tensor:
    """Return which examples belong to a part, booleans `[rows]`.

    Args:
        indices: Integers `[rows]`, the indices of the examples in their file.
        origin: The name of the file; the hash covers both name and index.
        part: The part.
        share: Fraction of the examples for validation.

    >>> validation = in_part(tf.range(10_000), "rows.csv", "validation", 0.2)
    >>> round(float(tf.reduce_mean(tf.cast(validation, tf.float32))), 1)
    0.2
    >>> bool(tf.reduce_all(validation != in_part(tf.range(10_000), "rows.csv", "train", 0.2)))
    True
    """
    if share is None or part == "all":
        return tf.ones_like(indices, tf.bool)
    names = tf.strings.join([tf.as_string(indices), origin], separator=" of ")
    held_out = tf.strings.to_hash_bucket_fast(names, NUM_BUCKETS) < round(share * NUM_BUCKETS)
    return held_out if part == "validation" else ~held_out


def name_hash(name: str) -> int:
    """Return a 64-bit hash of a name, because Python's own hash differs between processes.

    >>> name_hash("cat/1.jpg") == name_hash("cat/1.jpg")
    True
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
