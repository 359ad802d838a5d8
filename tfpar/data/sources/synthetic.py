"""Regression data that are generated as they are read: any number of rows, none in memory."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfpar.data.batching import blocks

VALUES_PER_COUNTER = 4  # a step of the Philox counter gives four 32-bit numbers
PHILOX = 1  # tf.random.Algorithm.PHILOX.value
BLOCK_ROWS = 8192
MIN_BLOCKS = 64  # so that a small dataset can still be shuffled


class Truth(NamedTuple):
    """The true parameters of the data: `label = row @ weights + bias + noise`."""

    weights: npt.NDArray[np.float32]
    bias: float


def truth(num_features: int, seed: int) -> Truth:
    """Return the true weights `[num_features]` and bias of the generated rows.

    >>> truth(3, seed=0).weights.shape
    (3,)
    """
    generator = np.random.default_rng(seed)
    return Truth(generator.standard_normal(num_features, np.float32), float(generator.standard_normal()))


def regression(
    num_examples: int,
    *,
    num_features: int,
    noise: float,
    global_batch_size: int,
    seed: int,
    first_row: int = 0,
    shuffle: bool = False,
) -> tf.data.Dataset:
    """Generate rows of standard normal features and their labels, `y = x w + b + noise`, as they are read.

    A row depends only on its number and the seed, not on the batch size or the epoch: the counter of the Philox
    generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) is set to the number of the row. Rows
    are independent of each other, so an epoch shuffles blocks of up to 8,192 consecutive rows (at least 64 blocks, if
    there are as many batches), which is many times cheaper than shuffling rows.

    Args:
        num_examples: Rows in one epoch.
        num_features: Columns of one row.
        noise: Standard deviation of the noise.
        global_batch_size: Rows in one batch; the last may be smaller.
        seed: Seed of weights, rows and order.
        first_row: Number of the first row; other ranges are other data with the same truth.
        shuffle: Whether to shuffle in each epoch.

    Returns:
        Batches `([batch, num_features], [batch, 1])` in float32.

    >>> rows = regression(10, num_features=3, noise=0.0, global_batch_size=4, seed=0)
    >>> [tuple(x.shape) for x, y in rows]
    [(4, 3), (4, 3), (2, 3)]
    """
    weights, bias = truth(num_features, seed)
    num_counters = -(-(num_features + 1) // VALUES_PER_COUNTER)

    def read(row: tf.Tensor, n: int) -> tuple[tf.Tensor, tf.Tensor]:
        counter = tf.stack([tf.cast((row + first_row) * num_counters, tf.uint64), tf.constant(0, tf.uint64)])
        normal = tf.raw_ops.StatelessRandomNormalV2(
            shape=[n, num_counters * VALUES_PER_COUNTER],
            key=tf.constant([seed % 2**64], tf.uint64),
            counter=counter,
            alg=PHILOX,
        )
        x, error = normal[:, :num_features], normal[:, num_features : num_features + 1]
        return x, tf.linalg.matmul(x, weights[:, np.newaxis]) + (bias + noise * error)

    num_batches = -(-num_examples // global_batch_size)
    dataset = blocks.batches(
        read,
        num_examples,
        global_batch_size,
        batches_per_block=max(1, min(BLOCK_ROWS // global_batch_size, num_batches // MIN_BLOCKS)),
        shuffle_seed=seed if shuffle else None,
        num_parallel_calls=2,
    )
    return blocks.as_built(dataset)
