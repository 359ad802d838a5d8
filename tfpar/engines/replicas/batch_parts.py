"""Split of a global batch into per-replica batches, also with fewer examples than replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpar import data


def split_into_parts(batch: Any, num_examples: tf.Tensor, num_parts: int, own: slice) -> Any:
    """Split a batch into per-replica batches; return those of this process, with their sizes and weights.

    Args:
        batch: Examples, `[examples, ...]` in any structure.
        num_examples: The size of the batch, a scalar.
        num_parts: The number of per-replica batches.
        own: The per-replica batches to return.

    Returns:
        `(parts, num_counted, example_weight, num_examples)`, as `DataParallel.distribute` describes them.
    """
    on_all = num_examples < num_parts

    def whole() -> Any:
        num_counted = [num_examples if part == 0 else tf.zeros_like(num_examples) for part in range(num_parts)[own]]
        return (batch,) * len(num_counted), tf.stack(num_counted)

    def cut() -> Any:
        parts = data.split_batch(batch, num_parts)[own]
        return parts, tf.stack([data.num_rows(part) for part in parts])

    parts, num_counted = tf.cond(on_all, whole, cut)
    parts = tf.nest.map_structure(_of_any_size, parts)
    return parts, num_counted, tf.where(on_all, tf.constant(1.0 / num_parts, tf.float64), 1.0), num_examples


def _of_any_size(part: Any) -> Any:
    """Drop the static number of rows: workers must trace the same function, and their sizes may differ by a row."""
    if not isinstance(part, tf.Tensor):
        return part
    return tf.compat.v1.placeholder_with_default(part, [None, *part.shape[1:]])
