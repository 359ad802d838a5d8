"""Digests of global batches, to detect workers that read the same data in different orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import tf_datasets
from tfpar.data.batching.batches import num_rows

NUM_NUMBERS = 3
_VALUES_PER_ROW = 32  # at most about twice as many, spread over all columns of a tensor
_STEP, _NUM_WEIGHTS = 40_503, 65_521  # from one weight to the next, modulo a prime
_HASH_BUCKETS = 1 << 20


def batch_digest(dataset: tf.data.Dataset) -> Callable[[Any], tf.Tensor]:
    """Return a function, for `map`, that computes the digest of a batch of a dataset.

    A digest is a float64 vector of three numbers: 1 if random operations may change all compared values, else 0; the
    number of rows; a sum of the compared values, weighted by position. Different processors may round the sum
    differently.

    The digest covers targets, sample weights and inputs that no random operation can change. Inputs from Python code,
    which may draw random numbers, count only if there are no targets.

    Example:
        >>> batches = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.constant([1, -1])))
        >>> [batch_digest(batches)(batch).shape for batch in batches]
        [TensorShape([3])]
    """
    compared = _compared(dataset)
    is_random = tf.constant(float(not compared), tf.float64)

    def digest(batch: Any) -> tf.Tensor:
        leaves = tf.nest.flatten(batch)
        chosen = [leaves[number] for number in compared] or leaves
        tensors = [leaf for leaf in tf.nest.flatten(chosen, expand_composites=True) if leaf is not None]
        values = tf.concat([_sample(tensor) for tensor in tensors], 0)
        return tf.stack([is_random, tf.cast(num_rows(batch), tf.float64), _weighted_sum(values)])

    return digest


def _compared(dataset: tf.data.Dataset) -> list[int]:
    """Return the indices of the leaves of a batch that no random operation can change."""
    spec = dataset.element_spec
    leaves, are_random = tf.nest.flatten(spec), iter(tf_datasets.random_components(dataset))
    fixed = {index for index, leaf in enumerate(leaves) if _is_tensor(leaf) and not next(are_random)}
    indices = tf.nest.pack_sequence_as(spec, [i if _is_tensor(leaf) else None for i, leaf in enumerate(leaves)])
    inputs, *others = keras.utils.unpack_x_y_sample_weight(indices)
    targets = [index for index in tf.nest.flatten(others) if index is not None]
    if targets and tf_datasets.calls_python(dataset):
        fixed -= set(tf.nest.flatten(inputs))
    return sorted(fixed)


def _is_tensor(spec: Any) -> bool:
    return not isinstance(spec, tf.NoneTensorSpec)


def _sample(tensor: tf.Tensor) -> tf.Tensor:
    """Return some values of each row of a tensor, as a float32 vector."""
    values = tf.reshape(tensor, [-1])
    step = (tensor.shape[1:].num_elements() or 1) // _VALUES_PER_ROW | 1  # odd, to take other columns in the next row
    if step > 1:
        values = values[::step]
    if values.dtype == tf.string:
        values = tf.strings.to_hash_bucket_fast(values, _HASH_BUCKETS)
    return tf.cast(values, tf.float32)


def _weighted_sum(values: tf.Tensor) -> tf.Tensor:
    """Return a sum that depends on the order of values, and in which no value dominates."""
    finite = tf.where(tf.math.is_finite(values), values, 0.0)
    logarithms = tf.math.log1p(tf.abs(finite + 0.7))  # 1 and -1 differ
    weights = 1 + tf.range(tf.size(values, tf.int64)) * _STEP % _NUM_WEIGHTS
    return tf.reduce_sum(tf.cast(logarithms, tf.float64) * tf.cast(weights, tf.float64))
