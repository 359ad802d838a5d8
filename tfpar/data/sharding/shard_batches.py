"""Join the batches of shards to global batches, and pad them with empty batches after the end of a shard."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.data.batching.batches import join_batches, num_rows, take_rows


def pad_with_empty_batches(batches: tf.data.Dataset, reserve: tf.data.Dataset | None) -> tf.data.Dataset:
    """Append infinitely many padding batches, each one example with a count of 0, to batches `(rows, count)`.

    The example is the first of the batches, or that of `reserve` if there is no batch.
    """
    spec, _ = batches.element_spec
    nothing = no_rows(spec)

    # TensorFlow 2.21 refuses a ragged tensor as state of scan and reduce, but accepts its components.
    def unpacked(rows: Any) -> tuple[tf.Tensor, ...]:
        return tuple(part for part in tf.nest.flatten(rows, expand_composites=True) if part is not None)

    packed = functools.partial(tf.nest.pack_sequence_as, spec, expand_composites=True)

    def from_reserve() -> Any:
        if reserve is None:
            return nothing
        components = reserve.map(lambda *rows: unpacked(rows))
        return packed(components.reduce(unpacked(nothing), lambda _, rows: rows))

    # The signature keeps scan from tracing it again for each new shape.
    @tf.function(input_signature=[tuple(tf.nest.flatten(spec, expand_composites=True)), batches.element_spec])
    def fill(state: Any, element: tuple[Any, tf.Tensor]) -> tuple[Any, tuple[Any, tf.Tensor]]:
        rows, count = element
        earlier = packed(state)
        first = lambda: tf.cond(count > 0, lambda: take_rows(rows, 0, 1), from_reserve)  # noqa: E731
        example = tf.cond(num_rows(earlier) > 0, lambda: earlier, first)
        return unpacked(example), (tf.cond(count > 0, lambda: rows, lambda: example), count)

    ended = tf.data.Dataset.from_tensors((nothing, tf.constant(0, tf.int64))).repeat()
    return batches.concatenate(ended).scan(unpacked(nothing), fill)


def no_rows(spec: Any) -> Any:
    """Return a batch of no rows; unknown sizes become 0."""

    def empty(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return None
        if leaf.shape.rank is None:
            raise ValueError(f"Every part of an example must have a known number of axes, but one is {leaf}.")
        shape = [0, *(size or 0 for size in leaf.shape[1:])]
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
        if isinstance(leaf, tf.RaggedTensorSpec):
            values = tf.zeros([0, *shape[leaf.ragged_rank + 1 :]], leaf.dtype)
            splits = [tf.zeros([1], leaf.row_splits_dtype)] * leaf.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(values, splits)
        return tf.zeros(shape, leaf.dtype)

    return tf.nest.map_structure(empty, spec)


def join(parts: Sequence[Any]) -> Any:
    """Join the rows of the parts to one batch; parts without rows take the sizes of the others."""

    def fit(*leaves: Any) -> list[Any]:
        if not isinstance(leaves[0], tf.Tensor) or leaves[0].shape[1:].is_fully_defined():
            return list(leaves)
        sizes = tf.reduce_max([tf.shape(leaf)[1:] for leaf in leaves], axis=0)
        return [leaf if leaf is None else _with_sizes(leaf, sizes) for leaf in leaves]

    fitted = [fit(*leaves) for leaves in zip(*(tf.nest.flatten(part) for part in parts), strict=True)]
    return join_batches([tf.nest.pack_sequence_as(parts[0], leaves) for leaves in zip(*fitted, strict=True)])


def _with_sizes(leaf: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(leaf)
    fitted = tf.reshape(leaf, tf.concat([shape[:1], tf.where(shape[0] == 0, sizes, shape[1:])], axis=0))
    return tf.ensure_shape(fitted, leaf.shape)
