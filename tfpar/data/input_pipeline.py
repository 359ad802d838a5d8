"""The input pipeline from the training examples of a split to global batches, whole or in shards.

    read -> cache -> shuffle -> decode -> augment hook -> batch -> augment -> check labels -> normalize -> prefetch

Operations that are cheaper on whole batches come after `batch`. Single examples are decoded with one parallel call per
core of this worker. Without autotuning, AUTOTUNE means at most 16 calls (`parallel_map_dataset_op.cc` of TensorFlow
2.21), which is enough for whole batches only.
"""

from collections.abc import Callable

import tensorflow as tf

from tfpar import config
from tfpar.cluster.cores import num_allowed_cores
from tfpar.data import images
from tfpar.data.sharding.sharded import Sharded
from tfpar.data.sharding_policy import ShardingPolicy
from tfpar.data.sources.split import Split

Augment = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Finish = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

SEEDS = 3  # of one input pipeline: order, augment hook, augmentation


def training(
    split: Split,
    settings: config.Data,
    policy: ShardingPolicy,
    *,
    global_batch_size: int,
    seed: int,
    augment: Augment | None,
    finish: Finish,
) -> tf.data.Dataset | Sharded:
    """Build the training batches under a sharding policy: a plain dataset for "batch", else `Sharded`.

    Args:
        split: The training split.
        settings: Uses `shuffle_buffer`, `cache` and `augmentation`.
        policy: The sharding policy.
        global_batch_size: Examples in one batch over all workers.
        seed: Seed of order and augmentation; shard s uses the seeds from `seed + 3 s` on.
        augment: Function that changes single images, or None.
        finish: Function that is mapped over batches last.
    """
    if policy.kind == "batch":
        batches = _examples(split, settings, settings.shuffle_buffer, seed, augment).batch(global_batch_size)
        return ready(_augmented(batches, settings, seed), finish)
    if split.decode is not None:
        split = split._replace(decode=tf.function(split.decode))  # traced once for all shards
    shuffle_buffer = -(-settings.shuffle_buffer // policy.num_shards)

    def make_shard(shard: int) -> tf.data.Dataset:
        own = split.shard(policy.kind, policy.num_shards, shard)
        return _examples(own, settings, shuffle_buffer, seed + SEEDS * shard, augment)

    def change_batches(batches: tf.data.Dataset, shard: int) -> tf.data.Dataset:
        return _augmented(batches, settings, seed + SEEDS * shard)

    return Sharded(make_shard, policy.num_shards, global_batch_size, finish, change_batches)


def ready(batches: tf.data.Dataset, finish: Finish) -> tf.data.Dataset:
    """Apply `finish` to the batches and prefetch them, in a fixed order."""
    options = tf.data.Options()
    options.deterministic = True
    dataset = batches.map(finish, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return dataset.with_options(options)


def _examples(
    split: Split, settings: config.Data, shuffle_buffer: int, seed: int, augment: Augment | None
) -> tf.data.Dataset:
    # The cache holds decoded examples, which saves time. Without it the shuffle buffer holds encoded examples, which
    # saves memory.
    dataset = split.decoded().cache() if settings.cache else split.stored
    buffer_size = min(shuffle_buffer, split.num_examples or shuffle_buffer)
    if buffer_size:
        dataset = dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True)
    if split.decode is not None and not settings.cache:
        dataset = dataset.map(split.decode, num_parallel_calls=num_allowed_cores())
    return dataset if augment is None else _map_with_seeds(dataset, augment, seed + 1, num_allowed_cores())


def _augmented(batches: tf.data.Dataset, settings: config.Data, seed: int) -> tf.data.Dataset:
    if not settings.augmentation:
        return batches
    change = lambda batch, seeds: images.augment(batch, seeds, settings.augmentation)  # noqa: E731
    return _map_with_seeds(batches, change, seed + 2)


def _map_with_seeds(
    dataset: tf.data.Dataset, change: Augment, seed: int, num_calls: int = tf.data.AUTOTUNE
) -> tf.data.Dataset:
    """Change the inputs of each element with a seed of its own; each epoch draws new seeds reproducibly."""
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True)

    def apply(element: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, labels = element
        changed = tf.ensure_shape(change(inputs, seeds), inputs.shape)
        return changed, labels

    return tf.data.Dataset.zip((dataset, seeds)).map(apply, num_parallel_calls=num_calls)
