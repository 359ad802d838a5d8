"""All-gather of model outputs over the replicas of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar import data
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.reduction.replicas import replica_id


def all_gather_outputs(outputs: Any, example_weight: tf.Tensor, num_examples: tf.Tensor, shares: Sequence[int]) -> Any:
    """Return the outputs for the global batch on every replica, in replica context.

    Args:
        outputs: Outputs of the calling replica, `[examples, ...]` in any structure.
        example_weight: Weight of an example; less than 1 if every replica computed the whole batch.
        num_examples: Size of the global batch.
        shares: Relative size of the per-replica batch of each replica, on all workers.

    Raises:
        TypeError: If an output is not a dense tensor.
    """
    index = replica_id()
    with tf.device(HOST):  # the host would wait for sizes on a GPU
        start = tf.where(example_weight < 1, tf.zeros_like(num_examples), data.first_rows(num_examples, shares)[index])

    def gather(output: Any) -> tf.Tensor:
        """Return the rows of all replicas, or those of the first if every replica computed the whole batch."""
        if not isinstance(output, tf.Tensor):
            raise TypeError(
                f"Over several workers a model must predict dense tensors, and it returned "
                f"{type(output).__name__}. End it with a layer that makes them dense, or predict on SingleDevice()."
            )
        shape_here = tf.shape(output, tf.int64)
        with tf.device(HOST):
            rows = tf.where((example_weight >= 1) | (index == 0), shape_here[0], 0)
            shape = tf.concat([[num_examples], shape_here[1:]], 0)
        if output.dtype == tf.string:
            with tf.device(HOST):
                return _gather_strings(output[:rows], start, shape)
        return _sum_in_place(output[:rows], start, shape)

    return tf.nest.map_structure(gather, outputs)


def _gather_strings(strings: tf.Tensor, start: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Return the strings of all replicas, sent as numbers: first their lengths, then their bytes."""
    flat = tf.reshape(strings, [-1])
    lengths_here = tf.reshape(tf.strings.length(flat), tf.shape(strings))
    lengths = tf.reshape(_sum_in_place(lengths_here, start, shape), [-1])
    num_bytes = tf.concat([[0], tf.cumsum(lengths)], 0)
    start_byte = num_bytes[start * tf.reduce_prod(shape[1:])]
    bytes_here = tf.cast(tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8), tf.int32)
    gathered = _sum_in_place(bytes_here, tf.cast(start_byte, tf.int64), num_bytes[-1:])
    characters = tf.gather(tf.constant([bytes([number]) for number in range(256)]), gathered)
    numbers = tf.repeat(tf.range(tf.size(lengths)), lengths)
    return tf.reshape(tf.strings.unsorted_segment_join(characters, numbers, tf.size(lengths)), shape)


def _sum_in_place(rows: tf.Tensor, start: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Gather rows by a sum over all replicas, in which each fills its own rows and leaves zeros elsewhere."""
    with tf.device(HOST):
        indices = (start + tf.range(tf.shape(rows, tf.int64)[0]))[:, None]
    whole = tf.tensor_scatter_nd_update(tf.zeros(shape, rows.dtype), indices, rows)
    return tf.distribute.get_replica_context().all_reduce("SUM", whole)
