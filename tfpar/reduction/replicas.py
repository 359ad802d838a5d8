"""The replicas of a step: sums over all of them, and their numbers."""

from __future__ import annotations

import tensorflow as tf


def sum_over_replicas(term: tf.Tensor) -> tf.Tensor:
    """Return the sum of a tensor over all replicas; its gradient is summed over all replicas too.

    Args:
        term: The tensor of the calling replica.
    """
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, term)


def sum_without_gradient(term: tf.Tensor) -> tf.Tensor:
    """Return the sum of a tensor over all replicas, without a gradient.

    Args:
        term: The tensor of the calling replica.
    """
    return sum_over_replicas(tf.stop_gradient(term))


def replica_id() -> int:
    """Return the number of the traced replica among those of all workers, from 0."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def local_replica_id() -> int:
    """Return the number of the traced replica among those of this process, from 0; 0 without a strategy."""
    if not tf.distribute.has_strategy():
        return 0
    return replica_id() % len(tf.distribute.get_strategy().extended.worker_devices)
