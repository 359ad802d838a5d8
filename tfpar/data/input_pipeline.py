"""The training examples of a split on their way to global batches, as one pipeline or as shards.

    read -> cache -> shuffle -> decode -> augment hook -> batch -> augment -> check labels -> normalise -> prefetch

What is the same for every image of a batch, or cheaper for all of them at once, stands after `batch`.
"""

from collections.abc import Callable

import tensorflow as tf

from tfpar import config
from tfpar.data import images
from tfpar.data.sharding.sharded import Sharded
from tfpar.data.sharding_policy import ShardingPolicy
from tfpar.data.sources.split import Split

Augment = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Finish = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

SEEDS = 3  # a pipeline draws from so many streams: order, augment hook, augmentation


def training(
    split: Split,
    settings: config.Data,
    choice: ShardingPolicy,
    *,
    global_batch_size: int,
    seed: int,
    augment: Augment | None,
    finish: Finish,
) -> tf.data.Dataset | Sharded:
    """The training batches in the chosen division: a plain data set for "batch", else shards.

    Args:
        split: The training split.
        settings: `shuffle_buffer`, `cache` and `augmentation` count here.
        choice: The division.
        global_batch_size: Examples in one batch over all workers.
        seed: Fixes order and augmentation; shard s draws from the seeds from `seed + 3 s` on.
        augment: Changes single images, or None.
        finish: The last map over batches.
    """
    if choice.kind == "batch":
        batches = _examples(split, settings, settings.shuffle_buffer, seed, augment).batch(global_batch_size)
        return ready(_augmented(batches, settings, seed), finish)
    if split.decode is not None:
        split = split._replace(decode=tf.function(split.decode))  # traced once for all shards
    shuffle_buffer = -(-settings.shuffle_buffer // choice.num_shards)

    def make_shard(shard: int) -> tf.data.Dataset:
        own = split.shard(choice.kind, choice.num_shards, shard)
        return _examples(own, settings, shuffle_buffer, seed + SEEDS * shard, augment)

    def change_pieces(pieces: tf.data.Dataset, shard: int) -> tf.data.Dataset:
        return _augmented(pieces, settings, seed + SEEDS * shard)

    return Sharded(make_shard, choice.num_shards, global_batch_size, finish, change_pieces)


def ready(batches: tf.data.Dataset, finish: Finish) -> tf.data.Dataset:
    """Batches finished and read ahead, in a fixed order."""
    options = tf.data.Options()
    options.deterministic = True
    dataset = batches.map(finish, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return dataset.with_options(options)


def _examples(
    split: Split, settings: config.Data, shuffle_buffer: int, seed: int, augment: Augment | None
) -> tf.data.Dataset:
    # Cached examples are decoded ones, that is what makes a cache worth its memory; a shuffle buffer alone holds
    # them as stored, which is smaller.
    dataset = split.decoded().cache() if settings.cache else split.stored
    buffer_size = min(shuffle_buffer, split.num_examples or shuffle_buffer)
    if buffer_size:
        dataset = dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True)
    if split.decode is not None and not settings.cache:
        dataset = dataset.map(split.decode, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset if augment is None else _map_with_seeds(dataset, augment, seed + 1)


def _augmented(batches: tf.data.Dataset, settings: config.Data, seed: int) -> tf.data.Dataset:
    if not settings.augmentation:
        return batches
    change = lambda batch, seeds: images.augment(batch, seeds, settings.augmentation)  # noqa: E731
    return _map_with_seeds(batches, change, seed + 2)


def _map_with_seeds(dataset: tf.data.Dataset, change: Augment, seed: int) -> tf.data.Dataset:
    """Changes the inputs, each element with a seed of its own; the seeds are drawn anew, and replayably, each epoch."""
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True)

    def apply(element: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, labels = element
        changed = tf.ensure_shape(change(inputs, seeds), inputs.shape)
        return changed, labels

    return tf.data.Dataset.zip((dataset, seeds)).map(apply, num_parallel_calls=tf.data.AUTOTUNE)
