"""Outputs of the replicas of all workers, combined into those of the global batch on every worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpar.strategies.batches_ahead import HOST


def all_gather_outputs(outputs: Any, example_weight: tf.Tensor, num_examples: tf.Tensor, num_replicas: int) -> Any:
    """Return the outputs for the global batch from those of every replica; called in replica context.

    Args:
        outputs: The outputs of the calling replica, `[examples, ...]` in any structure.
        example_weight: The weight of an example; less than 1 if every replica computed the whole batch.
        num_examples: The size of the global batch.
        num_replicas: Replicas of all workers together.

    Raises:
        TypeError: If an output is no dense tensor.
    """
    context = tf.distribute.get_replica_context()
    index = tf.cast(tf.get_static_value(context.replica_id_in_sync_group), tf.int64)

    def gather(output: Any) -> tf.Tensor:
        """Sum tensors of the size of the global batch; each replica fills its own rows and leaves zeros elsewhere."""
        if not isinstance(output, tf.Tensor):
            raise TypeError(
                f"Over several workers a model must predict dense tensors, and it returned "
                f"{type(output).__name__}. End it with a layer that makes them dense, or predict on SingleDevice()."
            )
        shape_here = tf.shape(output, tf.int64)
        with tf.device(HOST):  # sizes on a GPU would let the host wait for it
            is_first_copy = (example_weight >= 1) | (index == 0)
            start = tf.where(example_weight < 1, tf.zeros_like(index), -(-index * num_examples // num_replicas))
            rows = tf.where(is_first_copy, shape_here[0], 0)
            shape = tf.concat([[num_examples], shape_here[1:]], 0)
            places = (start + tf.range(rows))[:, None]
        whole = tf.tensor_scatter_nd_update(tf.zeros(shape, output.dtype), places, output[:rows])
        return context.all_reduce("SUM", whole)

    return tf.nest.map_structure(gather, outputs)
