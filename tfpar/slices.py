"""Gradients of rows of a weight: which rows of two parts of a batch are one row on one device, and which are two.

    lookup of every example       part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 5 7    (listed)
    product with a sparse tensor  part 0: rows 3 5    part 1: rows 5 7    one device: rows 3 5 7      (distinct)
    positions of a sequence       part 0: rows 0 1    part 1: rows 0 1    one device: rows 0 1        (alike)

It matters where an optimizer is not linear in a gradient: Keras 3.15 squares rows one by one, also those of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

Kind = Literal["listed", "distinct", "alike"]

_PASS_ON = ("Identity", "Reshape", "Cast", "Squeeze", "ExpandDims")
# Operations that give each number once, and which of their outputs does (TensorFlow 2.21).
_DISTINCT = {
    "Range": 0,
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), 0),
    **dict.fromkeys((f"SparseSegment{kind}GradV2" for kind in ("Sum", "Mean", "SqrtN")), 1),
}


class Piece(NamedTuple):
    """The rows of one lookup.

    Args:
        kind: What becomes of rows of the same number in several parts.
        values: `[rows, ...]`.
        indices: `[rows]`.
    """

    kind: Kind
    values: tf.Tensor
    indices: tf.Tensor


def pieces(gradient: tf.IndexedSlices, kinds: Sequence[Kind] | None = None) -> list[Piece]:
    """Return the lookups that a gradient is the sum of.

    Args:
        gradient: Of one weight, in the graph that computes it.
        kinds: Those of the lookups where the gradient has no graph, as `kinds` found them in another.
    """
    if kinds is not None:
        return [Piece(kinds[0], gradient.values, gradient.indices)]
    indices = _lookups(gradient.indices)
    if len(indices) == 1:
        return [Piece(_kind(indices[0]), gradient.values, gradient.indices)]
    values = tf.split(gradient.values, [tf.size(each) for each in indices])
    return [Piece(_kind(each), value, each) for each, value in zip(indices, values, strict=True)]


def kinds(gradients: Sequence[Any]) -> list[list[Kind]]:
    """Return the kinds of the lookups behind each gradient, from the graph that computes it; none if it is dense."""
    return [
        [_kind(each) for each in _lookups(gradient.indices)] if isinstance(gradient, tf.IndexedSlices) else []
        for gradient in gradients
    ]


def are_one(found: Sequence[Kind]) -> bool:
    """Say whether the lookups of one weight may be treated as one, where it is not known which row is of which."""
    return len(found) == 1 or (found[0] != "distinct" and len(set(found)) == 1)


def to_send(piece: Piece, share: tf.Tensor, counted: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Return what a replica gives to the sum over all.

    Args:
        piece: The rows of a lookup.
        share: Scalar, what each of the replica's examples counts; less than 1 where other replicas have them too.
        counted: Scalar, how many of its examples the replica counts; of those that have the same, one counts all.
    """
    if piece.kind == "alike":
        return piece.values
    if piece.kind == "distinct":
        return tf.IndexedSlices(piece.values, piece.indices)
    num_rows = tf.where((share < 1) & (counted == 0), 0, tf.size(piece.indices))
    scale = tf.cast(tf.where(share > 0, 1 / share, 0), piece.values.dtype)
    return tf.IndexedSlices(piece.values[:num_rows] * scale, piece.indices[:num_rows])


def summed(piece: Piece, total: tf.Tensor | tf.IndexedSlices) -> Piece:
    """Return the rows of a lookup of the whole batch.

    Args:
        piece: The replica's own rows.
        total: The sum of what all replicas sent, or their rows one after another.
    """
    if piece.kind == "alike":
        return piece._replace(values=total)
    rows = total.values, total.indices
    return Piece(piece.kind, *(merge(*rows) if piece.kind == "distinct" else rows))


def merge(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up rows of the same number; return the rows and their numbers, each once."""
    numbers, places = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, places, tf.size(numbers)), numbers


def join(many: Sequence[Piece], dense_shape: tf.Tensor | None) -> tf.IndexedSlices:
    """Return one gradient of the rows of several lookups."""
    if len(many) == 1:
        return tf.IndexedSlices(many[0].values, many[0].indices, dense_shape)
    values, indices = tf.concat([each.values for each in many], 0), tf.concat([each.indices for each in many], 0)
    return tf.IndexedSlices(values, indices, dense_shape)


def _lookups(indices: tf.Tensor) -> list[tf.Tensor]:
    """Return the row numbers of each lookup: TensorFlow concatenates those of several uses of one weight."""
    op = indices.op
    if op.type in ("Identity", "Reshape") and op.inputs[0].shape.rank == 1:
        return _lookups(op.inputs[0])
    if op.type == "ConcatV2" and indices.shape.rank == 1:
        return [each for part in op.inputs[:-1] for each in _lookups(part)]
    return [indices]


def _kind(indices: tf.Tensor) -> Kind:
    if _is_constant(indices):
        return "alike"
    while (source := _source(indices)) is not None:
        indices = source
    return "distinct" if _DISTINCT.get(indices.op.type) == indices.value_index else "listed"


def _source(indices: tf.Tensor) -> tf.Tensor | None:
    """Return the numbers that an operation passes on, each to one of its own; None for another operation."""
    op = indices.op
    if op.type in _PASS_ON:
        return op.inputs[0]
    if op.type in ("AddV2", "Sub"):  # an offset, the same for all
        number, offset = op.inputs if op.inputs[1].shape.rank == 0 else reversed(op.inputs)
        return number if offset.shape.rank == 0 else None
    if op.type == "SelectV2":
        # Keras 3.15 counts negative numbers from the end: where(i < 0, i + size, i).
        _, shifted, number = op.inputs
        return number if shifted.op.type == "AddV2" and shifted.op.inputs[0] is number else None
    return None


def _is_constant(tensor: tf.Tensor) -> bool:
    """Say whether a tensor is written in the graph, as the positions of a sequence of fixed length are."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type != "Const" and (op.op_def.is_stateful or not op.inputs):
            return False
        waiting += [each.op for each in op.inputs]
    return True
