"""Indexed slices of several parts of a batch: which duplicate rows are one row on one device, and which are two.

    lookup of every example       part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 5 7    (listed)
    product with a sparse tensor  part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 7      (shared)
    positions of a sequence       part 0: rows 0 1    part 1: rows 0 1    one device: rows 0 1        (shared)
    constant row numbers          part 0: rows 0 4    part 1: rows 0 4    one device: rows 0 4        (equal)

The kinds matter for optimizers that are not linear in the gradient: Keras 3.15 applies duplicate rows separately. The
kind follows from what the row numbers depend on (`row_numbers`). A number that occurs twice in a shared lookup has two
rows: the rows of different parts are matched in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tfpar.messages import user_warnings
from tfpar.reduction.gradients.row_numbers import Source, Sources

Kind = Literal["listed", "shared", "equal"]

_NUMBERS = 2**32  # more than the rows of any weight


class RowSlices(NamedTuple):
    """The rows of one lookup.

    Args:
        values: `[rows, ...]`.
        indices: `[rows]`.
    """

    values: tf.Tensor
    indices: tf.Tensor


class Lookups(NamedTuple):
    """The lookups of which a gradient is the sum, each with its kind."""

    rows: tuple[RowSlices, ...]
    kinds: tuple[Kind, ...]


_KINDS: dict[Source, Kind] = {
    Source.CONSTANT: "equal",
    Source.POSITIONS: "shared",
    Source.DISTINCT: "shared",
    Source.EXAMPLES: "listed",
}


def kinds_of(gradient: Any, sources: Sources) -> list[Kind | None]:
    """Return the kind of each lookup of a gradient, None for an unknown one; none for a dense gradient.

    Args:
        gradient: A traced gradient of one weight.
        sources: What the tensors of its graph depend on.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return []
    return [_KINDS.get(sources.of(one)) for one in _lookups(gradient.indices)]


def lookups_of(gradient: Any, weight: Any, kinds: Sequence[Kind | None]) -> Lookups | None:
    """Return the lookups of a gradient; None for a dense one, and after a warning for one with an unknown kind.

    Args:
        gradient: The gradient of one weight.
        weight: The weight, for the warning.
        kinds: The kinds of its lookups; of an eager gradient one kind.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    known = tuple(kind for kind in kinds if kind is not None)
    if len(known) < max(len(kinds), 1):
        _warn_of_dense(weight)
        return None
    indices = _lookups(gradient.indices) if tf.is_symbolic_tensor(gradient.indices) else [gradient.indices]
    sizes = [tf.size(one) for one in indices]
    values = tf.split(gradient.values, sizes) if len(sizes) > 1 else [gradient.values]
    return Lookups(tuple(map(RowSlices, values, indices)), known)


def _warn_of_dense(weight: Any) -> None:
    user_warnings.warn(
        f"The gradient of {weight.path!r} is added over the parts of a batch as a dense tensor: the rows that it lists "
        "are not known to follow from each example alone, from positions or from constants. The sum is that of one "
        "device, where optimizers such as Adam square rows of the same number separately; here they square their sum. "
        "For equal weights, compute the row numbers of each example from that example, or train on SingleDevice()."
    )


def to_send(
    rows: RowSlices, kind: Kind, example_weight: tf.Tensor, num_counted: tf.Tensor
) -> tf.Tensor | tf.IndexedSlices:
    """Return the operand of the calling replica in the all-reduce or all-gather of a lookup's rows.

    Args:
        rows: The rows of the lookup.
        kind: The kind of the lookup.
        example_weight: Scalar, the weight of an example; less than 1 if several replicas compute it.
        num_counted: Scalar, the number of its examples to count; of replicas with equal batches, one counts all.
    """
    if kind == "equal":
        return rows.values
    if kind == "shared":
        return tf.IndexedSlices(*numbered(rows))
    num_rows = tf.shape(rows.values)[0]
    with tf.device("CPU:0"):  # else the host, which needs the number, waits for the device
        num_rows = tf.where((example_weight < 1) & (num_counted == 0), 0, num_rows)
    scale = tf.cast(tf.where(example_weight > 0, 1 / example_weight, 0), rows.values.dtype)
    return tf.IndexedSlices(rows.values[:num_rows] * scale, rows.indices[:num_rows])


def summed(rows: RowSlices, kind: Kind, total: tf.Tensor | tf.IndexedSlices) -> RowSlices:
    """Return the rows of a lookup of the whole batch.

    Args:
        rows: The rows of the calling replica.
        kind: The kind of the lookup.
        total: The result of the all-reduce or the all-gather.
    """
    if kind == "equal":
        return rows._replace(values=total)
    all_rows = RowSlices(total.values, total.indices)
    all_rows = merged(all_rows) if kind == "shared" else all_rows
    # TensorFlow 2.21 runs an Identity of int32 on the host, which would wait for the rows of a device.
    return all_rows._replace(indices=tf.cast(all_rows.indices, tf.int64))


def numbered(rows: RowSlices) -> RowSlices:
    """Return rows of a shared lookup with unique numbers, equal in all parts: the occurrence and the row number.

    row numbers    3  5  3  3          the first, second, third row of number 3 ...
    occurrences    0  0  1  2          ... matches that of the other parts
    """
    order = tf.argsort(rows.indices, stable=True)
    in_order = tf.gather(rows.indices, order)
    is_first = tf.concat([tf.ones_like(in_order[:1], tf.bool), in_order[1:] != in_order[:-1]], 0)
    places = tf.range(tf.size(in_order))
    first = tf.gather(tf.boolean_mask(places, is_first), tf.cumsum(tf.cast(is_first, tf.int32)) - 1)
    occurrences = tf.scatter_nd(order[:, None], places - first, tf.shape(order))
    return rows._replace(indices=tf.cast(occurrences, tf.int64) * _NUMBERS + tf.cast(rows.indices, tf.int64))


def merged(rows: RowSlices) -> RowSlices:
    """Sum the uniquely numbered rows of a shared lookup over the parts; return them with their row numbers."""
    numbers, places = tf.unique(rows.indices)
    return RowSlices(tf.math.unsorted_segment_sum(rows.values, places, tf.size(numbers)), numbers % _NUMBERS)


def join(many: Sequence[RowSlices], dense_shape: tf.Tensor | None) -> tf.IndexedSlices:
    """Return one gradient of the rows of several lookups."""
    if len(many) == 1:
        return tf.IndexedSlices(many[0].values, many[0].indices, dense_shape)
    values = tf.concat([each.values for each in many], 0)
    return tf.IndexedSlices(values, tf.concat([tf.cast(each.indices, tf.int64) for each in many], 0), dense_shape)


def _lookups(indices: tf.Tensor) -> list[tf.Tensor]:
    """Return the row numbers of each lookup: TensorFlow concatenates those of several uses of one weight."""
    op = indices.op
    if op.type in ("Identity", "Reshape") and op.inputs[0].shape.rank == 1:
        return _lookups(op.inputs[0])
    if op.type == "ConcatV2" and indices.shape.rank == 1:
        return [each for part in op.inputs[:-1] for each in _lookups(part)]
    return [indices]
