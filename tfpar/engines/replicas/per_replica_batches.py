"""Splitting of a global batch into per-replica batches, even with fewer examples than replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar import data


def per_replica_batches(batch: Any, num_examples: tf.Tensor, shares: Sequence[int], own: slice) -> Any:
    """Split a global batch into per-replica batches, and return those of this process.

    Args:
        batch: Examples, `[examples, ...]` in any structure.
        num_examples: Size of the global batch, a scalar.
        shares: Relative size of each per-replica batch.
        own: Slice of the per-replica batches to return.

    Returns:
        `(batches, num_counted, example_weight, num_examples)`, as described in `ReplicaEngine.distribute`.
    """
    num_replicas = len(shares)
    is_replicated = num_examples < num_replicas

    def replicate() -> Any:
        zero = tf.zeros_like(num_examples)
        num_counted = [zero if replica else num_examples for replica in range(num_replicas)[own]]
        return (batch,) * len(num_counted), tf.stack(num_counted)

    def split() -> Any:
        batches = data.split_batch(batch, num_replicas, shares)[own]
        return batches, tf.stack(list(map(data.num_rows, batches)))

    batches, num_counted = tf.cond(is_replicated, replicate, split)
    batches = tf.nest.map_structure(_without_size, batches)
    example_weight = tf.where(is_replicated, tf.constant(1.0 / num_replicas, tf.float64), 1.0)
    return batches, num_counted, example_weight, num_examples


def _without_size(tensor: Any) -> Any:
    """Drop the static number of rows, which differs by worker: all workers must trace the same function."""
    if not isinstance(tensor, tf.Tensor):
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])
