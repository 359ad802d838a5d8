"""How the sparse gradient rows of several parts of a batch combine into those of one device.

    lookup of every example       part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 5 7    (concat)
    product with a sparse tensor  part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 7      (merge)
    positions of a sequence       part 0: rows 0 1    part 1: rows 0 1    one device: rows 0 1        (merge)
    constant row numbers          part 0: rows 0 4    part 1: rows 0 4    one device: rows 0 4        (sum)

The difference matters for optimizers that are not linear in the gradient, because Keras 3.15 applies duplicate rows
separately. The kind follows from what the row numbers depend on (`row_numbers`). Where a number occurs twice in rows to
merge, the parts are matched by occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tfpar.messages import user_warnings
from tfpar.reduction.gradients.row_numbers import Source, Sources

Kind = Literal["concat", "merge", "sum"]

_NUMBERS = 2**32  # more than the rows of any weight


class RowSlices(NamedTuple):
    """The sparse gradient rows of one lookup.

    Args:
        values: `[rows, ...]`.
        indices: `[rows]`.
    """

    values: tf.Tensor
    indices: tf.Tensor


class Lookups(NamedTuple):
    """The lookups that contribute to one sparse gradient, each with its kind."""

    rows: tuple[RowSlices, ...]
    kinds: tuple[Kind, ...]


_KINDS: dict[Source, Kind] = {
    Source.CONSTANT: "sum",
    Source.POSITIONS: "merge",
    Source.DISTINCT: "merge",
    Source.EXAMPLES: "concat",
}


def kinds_of(gradient: Any, sources: Sources) -> list[Kind | None]:
    """Return the kind of each lookup in a traced gradient; None if unknown, an empty list for a dense gradient.

    Args:
        gradient: The traced gradient of one weight.
        sources: What the tensors of its graph depend on.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return []
    return [_KINDS.get(sources.of(indices)) for indices in _lookups(gradient.indices)]


def lookups_of(gradient: Any, weight: Any, kinds: Sequence[Kind | None]) -> Lookups | None:
    """Split a sparse gradient into its lookups; return None for a dense gradient.

    If a kind is unknown, warn and return None: the gradient is then summed as a dense tensor.

    Args:
        gradient: The gradient of one weight.
        weight: The weight, for the warning.
        kinds: The kind of each lookup; a single kind for an eager gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    known = tuple(kind for kind in kinds if kind is not None)
    if len(known) < max(len(kinds), 1):
        _warn_of_dense(weight)
        return None
    indices = _lookups(gradient.indices) if tf.is_symbolic_tensor(gradient.indices) else [gradient.indices]
    sizes = [tf.size(rows) for rows in indices]
    values = tf.split(gradient.values, sizes) if len(sizes) > 1 else [gradient.values]
    return Lookups(tuple(map(RowSlices, values, indices)), known)


def _warn_of_dense(weight: Any) -> None:
    user_warnings.warn(
        f"The sparse gradient of {weight.path!r} is summed as a dense tensor: its row numbers are not known to follow "
        "from each example alone, from positions or from constants. The sum is that of one device, but optimizers such "
        "as Adam square duplicate rows separately there, and square their sum here. For equal weights, compute the row "
        "numbers of each example from that example, or train on SingleDevice()."
    )


def to_send(
    rows: RowSlices, kind: Kind, example_weight: tf.Tensor, num_counted: tf.Tensor
) -> tf.Tensor | tf.IndexedSlices:
    """Return what the calling replica sends to the all-reduce ("sum") or all-gather of a lookup's rows.

    Args:
        rows: The rows of the calling replica.
        kind: How the rows combine.
        example_weight: Scalar, the weight of an example; less than 1 if several replicas compute it.
        num_counted: Scalar, the number of its examples to count; of replicas with equal batches, one counts all.
    """
    if kind == "sum":
        return rows.values
    if kind == "merge":
        return tf.IndexedSlices(*numbered(rows))
    num_rows = tf.shape(rows.values)[0]
    with tf.device("CPU:0"):  # the host needs this number, and would wait for another device
        num_rows = tf.where((example_weight < 1) & (num_counted == 0), 0, num_rows)
    scale = tf.cast(tf.where(example_weight > 0, 1 / example_weight, 0), rows.values.dtype)
    return tf.IndexedSlices(rows.values[:num_rows] * scale, rows.indices[:num_rows])


def summed(rows: RowSlices, kind: Kind, total: tf.Tensor | tf.IndexedSlices) -> RowSlices:
    """Return a lookup's rows for the whole batch.

    Args:
        rows: The rows of the calling replica.
        kind: How the rows combine.
        total: The result of the all-reduce or all-gather.
    """
    if kind == "sum":
        return rows._replace(values=total)
    all_rows = RowSlices(total.values, total.indices)
    all_rows = merged(all_rows) if kind == "merge" else all_rows
    # TensorFlow 2.21 runs an Identity of int32 on the host, which would wait for the device.
    return all_rows._replace(indices=tf.cast(all_rows.indices, tf.int64))


def numbered(rows: RowSlices) -> RowSlices:
    """Give rows unique numbers, from occurrence and row number, so that `merged` can match those of all parts.

    row numbers    3  5  3  3
    occurrences    0  0  1  2
    """
    order = tf.argsort(rows.indices, stable=True)
    in_order = tf.gather(rows.indices, order)
    is_first = tf.concat([tf.ones_like(in_order[:1], tf.bool), in_order[1:] != in_order[:-1]], 0)
    places = tf.range(tf.size(in_order))
    first = tf.gather(tf.boolean_mask(places, is_first), tf.cumsum(tf.cast(is_first, tf.int32)) - 1)
    occurrences = tf.scatter_nd(order[:, None], places - first, tf.shape(order))
    return rows._replace(indices=tf.cast(occurrences, tf.int64) * _NUMBERS + tf.cast(rows.indices, tf.int64))


def merged(rows: RowSlices) -> RowSlices:
    """Sum the rows from `numbered` over all parts, and restore their row numbers."""
    numbers, places = tf.unique(rows.indices)
    return RowSlices(tf.math.unsorted_segment_sum(rows.values, places, tf.size(numbers)), numbers % _NUMBERS)


def join(lookups: Sequence[RowSlices], dense_shape: tf.Tensor | None) -> tf.IndexedSlices:
    """Concatenate the rows of several lookups into one sparse gradient."""
    if len(lookups) == 1:
        return tf.IndexedSlices(lookups[0].values, lookups[0].indices, dense_shape)
    values = tf.concat([rows.values for rows in lookups], 0)
    return tf.IndexedSlices(values, tf.concat([tf.cast(rows.indices, tf.int64) for rows in lookups], 0), dense_shape)


def _lookups(indices: tf.Tensor) -> list[tf.Tensor]:
    """Return the row numbers of each lookup, which TensorFlow concatenates if a weight is used several times."""
    op = indices.op
    if op.type in ("Identity", "Reshape") and op.inputs[0].shape.rank == 1:
        return _lookups(op.inputs[0])
    if op.type == "ConcatV2" and indices.shape.rank == 1:
        return [lookup for part in op.inputs[:-1] for lookup in _lookups(part)]
    return [indices]
