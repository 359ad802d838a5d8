"""The first global batch of each worker, compared: all workers read the whole data, and each takes its part.

the same data          worker 0: rows 0-3 of batch 0    worker 1: rows 4-7 of batch 0     the whole batch
dataset.shard(2, rank) worker 0: rows 0-3 of its half   worker 1: rows 4-7 of its half    half of the examples
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

_NUM_ROWS = 256


class FirstBatch:
    """Digests of the tensors of the first batch of a dataset, taken when the batch is read for training.

    Attributes:
        digests: A text for each tensor whose rows differ; empty before the batch is read.

    Example:
        >>> first, other = FirstBatch(), FirstBatch()
        >>> data = tf.data.Dataset.from_tensors((tf.range(3), tf.ones(3)))
        >>> batches = [list(data), list(first.noted(data)), list(other.noted(data.map(lambda x, y: (x + 1, y))))]
        >>> len(first.digests), first.is_unlike(first.digests), first.is_unlike(other.digests)
        (1, False, True)
    """

    def __init__(self) -> None:
        self.digests: list[str] = []

    def noted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the same dataset, which sets `digests`.

        Args:
            dataset: Batches in any structure, `[batch, ...]` each.
        """

        @tf.autograph.experimental.do_not_convert
        def note(index: tf.Tensor, batch: Any) -> Any:
            leaves = [_values(one) for one in tf.nest.flatten(batch) if one is not None]
            tensors = [one for one in leaves if one.dtype != tf.variant]
            number = tf.cond(
                tf.equal(index, 0),
                lambda: tf.numpy_function(self._note, tensors, tf.int64),
                lambda: tf.constant(0, tf.int64),
            )
            with tf.control_dependencies([number]):
                return tf.nest.map_structure(
                    lambda one: None if one is None else tf.identity(one), batch, expand_composites=True
                )

        return dataset.enumerate().map(note, num_parallel_calls=1)

    def is_unlike(self, others: list[str]) -> bool:
        """Return whether no tensor has the content that it has on another worker.

        Random augmentation without a seed changes inputs, not labels.

        Args:
            others: The digests of the other worker.
        """
        return bool(self.digests and others) and not set(self.digests) & set(others)

    def _note(self, *tensors: np.ndarray) -> np.int64:
        if not self.digests:
            rows = [one[:_NUM_ROWS] for one in tensors if one.ndim > 0]
            self.digests = [_digest(one) for one in rows if _varies(one)]
        return np.int64(0)


def _values(tensor: Any) -> tf.Tensor:
    """Return the values of a tensor: the lengths of ragged rows may be equal by chance."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.flat_values
    return tensor.values if isinstance(tensor, tf.SparseTensor) else tensor


def _varies(array: np.ndarray) -> bool:
    return len(array) > 1 and bool((array[1:] != array[:1]).any())


def _digest(rows: np.ndarray) -> str:
    content = rows.tobytes() if rows.dtype != object else repr(rows.tolist()).encode()
    return f"{rows.dtype} {rows.shape} {hashlib.sha256(content).hexdigest()[:16]}"
