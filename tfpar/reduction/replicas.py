"""Sums over the replicas of a step, and the number of the calling replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_distribute


def sum_over_replicas(term: tf.Tensor) -> tf.Tensor:
    """Sum a tensor over all replicas; the gradient is summed over all replicas too."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, term)


def sum_on(owner: int, term: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Sum a tensor over all replicas on the owner's device only; sparse gradient rows are concatenated.

    Args:
        owner: The local number of the replica that needs the sum.
        term: The tensor of the calling replica.
    """

    def reduce(strategy: tf.distribute.Strategy, terms: Any) -> Any:
        device = strategy.extended.worker_devices[owner]
        return SUM_ON_ONE_DEVICE.reduce(tf.distribute.ReduceOp.SUM, terms, device)

    return tf.distribute.get_replica_context().merge_call(reduce, args=(term,))


def _sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Add tensors in order.

    TensorFlow 2.21's graph optimizer turns sums of sums on one device into one AddN (AddOpsRewrite in
    arithmetic_optimizer.cc), which begins with any term whose memory it can reuse (aggregate_ops.cc). It does not look
    through a Snapshot, which returns its input.
    """
    return functools.reduce(lambda total, term: _snapshot(total) + _snapshot(term), terms)


def _snapshot(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.raw_ops.Snapshot(input=tensor)


# Sums on one device, bit for bit the same on any device.
SUM_ON_ONE_DEVICE = tf.distribute.ReductionToOneDevice(accumulation_fn=_sum_in_order)


def sum_without_gradient(term: tf.Tensor) -> tf.Tensor:
    """Sum a tensor over all replicas, without a gradient."""
    return sum_over_replicas(tf.stop_gradient(term))


def replica_id() -> int:
    """Return the number of the traced replica among those of all workers, from 0."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def local_replica_id() -> int:
    """Return the number of the traced replica among those of this process, from 0; 0 without a strategy."""
    if not tf.distribute.has_strategy():
        return 0
    return tf_distribute.local_replica_id()
