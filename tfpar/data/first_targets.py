"""A fingerprint of the first targets of a dataset, noted while its first batch is read anyway."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.data.batching.batches import copied, map_batches

_NUM_NUMBERS = 3  # for each tensor
_HASH_BUCKETS = 1 << 20


class FirstTargets:
    """The fingerprint of the targets of the first batch that a dataset yields, or of its inputs without targets.

    Targets are what random augmentation of inputs leaves as it is.

    Args:
        dataset: Global batches.

    Attributes:
        dataset: The same batches; reading the first one notes its fingerprint.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        with tf.device("CPU:0"):
            self._noted = tf.Variable(tf.zeros([0], tf.float64), shape=[None], trainable=False)

        def note(batch: Any) -> Any:
            def first() -> tf.Tensor:
                with tf.control_dependencies([self._noted.assign(_fingerprint(batch))]):
                    return tf.constant(True)

            is_first = tf.equal(tf.size(self._noted), 0)
            with tf.control_dependencies([tf.cond(is_first, first, lambda: tf.constant(False))]):
                return copied(batch)

        self.dataset = map_batches(dataset, note)

    def equal(self, of_chief: np.ndarray) -> bool:
        """Return whether the fingerprint is that of the chief, but for the rounding of other processors.

        Args:
            of_chief: What `numbers` returns there.
        """
        own = self.numbers()
        return own.shape == of_chief.shape and bool(np.allclose(own, of_chief, rtol=1e-5, atol=1e-6))

    def numbers(self) -> np.ndarray:
        """Return the fingerprint, empty before the first batch."""
        found: np.ndarray = self._noted.numpy()
        return found


def _fingerprint(batch: Any) -> tf.Tensor:
    """Return the size, the sum of absolute values and a sum with weights by position for each tensor of the targets."""
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    leaves = tf.nest.flatten(inputs if targets is None else targets, expand_composites=True)
    found = [number for leaf in leaves if leaf is not None for number in _numbers(leaf)]
    return tf.stack(found) if found else tf.zeros([_NUM_NUMBERS], tf.float64)


def _numbers(leaf: tf.Tensor) -> list[tf.Tensor]:
    if leaf.dtype == tf.string:
        leaf = tf.strings.to_hash_bucket_fast(leaf, _HASH_BUCKETS)
    values = tf.reshape(tf.cast(leaf, tf.float64), [-1])
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    size = tf.size(values)
    weights = 1.0 + tf.cast(tf.range(size) % 97, tf.float64) / 97.0
    return [tf.cast(size, tf.float64), tf.reduce_sum(tf.abs(values)), tf.reduce_sum(values * weights)]
