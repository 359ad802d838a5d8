"""Micro-batches padded to one size, so that XLA compiles each pass of a stage once.

    10 examples     micro-batches of 3 3 2 2     ─►  3 3 3 3     F  repeat the last row, and drop the added outputs
    a last batch of 5 examples       2 1 1 1     ─►  3 3 3 3     B  gradients of zero for the added rows

XLA compiles a function for each shape of its arguments. An added row repeats one of the micro-batch, so that no value
is less finite than without it; its gradients are exact zeros, as it has no loss. Only a stage that computes every row
alone is padded: no loss, metric or statistic of it may see an added row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.pipeline.stages.trace import StageTrace
from tfpar.reduction.gradients.gradient_addition import reached_from

_NUM_ROWS = 997  # a size that no layer has by itself


def can_pad(trace: StageTrace, per_example: Sequence[bool], *, with_lookups: bool) -> bool:
    """Return whether a stage gives the same results for the rows of a micro-batch if rows are added to it.

    Its layers are known to be batch-independent. Its added losses, metrics and moving statistics are not: a stage that
    has any of them is not padded. A seed is a state too, but does not depend on the rows.

    Args:
        trace: The graph of the stage.
        per_example: Whether each output of the stage has one row for each example.
        with_lookups: Whether the optimizer may receive one more row of zeros for a row that a lookup lists already.
    """
    looks_up = any(isinstance(gradient, tuple) for gradient in trace.backward.weight_gradients)
    if trace.losses or trace.ways or not trace.values or not all(per_example) or (looks_up and not with_lookups):
        return False
    of_rows = reached_from(trace.values)
    return not any(new is not None and new.op in of_rows for new in trace.new_states)


def outputs_per_example(trace: StageTrace, forward: Subgraph) -> list[bool]:
    """Return whether each output of a stage, and its mask, has one row for each example, as its inputs have.

    TensorFlow infers the shapes of the outputs for a number of examples. Where it cannot, the answer is False.

    Args:
        trace: The graph of the stage.
        forward: Its forward pass.
    """
    given = {value.ref() for value in trace.values}
    specs = [
        tf.TensorSpec([_NUM_ROWS, *one.shape[1:]] if one.ref() in given else one.shape, one.dtype)
        for one in forward.inputs
    ]
    try:
        inferred = forward.shapes(specs)
    except ValueError:  # a layer does not take this number of examples
        return [False] * len(trace.outputs)
    num_rows: dict[Any, int | None] = dict.fromkeys(given, _NUM_ROWS)  # an output may be an input
    num_rows |= {ref: shape[0] if shape.rank else None for ref, shape in inferred.items()}

    def has_them(tensor: Any) -> bool:
        return is_dense(tensor) and tensor.shape[0] is None and num_rows.get(tensor.ref()) == _NUM_ROWS

    pairs = zip(trace.outputs, trace.masks, strict=True)
    return [has_them(output) and (mask is None or has_them(mask)) for output, mask in pairs]


def is_dense(tensor: Any) -> bool:
    """Return whether a value of a graph is a tensor with at least one axis, neither ragged nor sparse."""
    return isinstance(tensor, tf.Tensor) and bool(tensor.shape.rank)


class Rows(NamedTuple):
    """The rows of a micro-batch.

    Args:
        own: Their number, an int64 scalar.
        padded: Their number with the added rows, an int64 scalar, at least `own`.
    """

    own: tf.Tensor
    padded: tf.Tensor


def repeat_last_row(tensor: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Return a tensor with copies of its last row after its own rows, `[rows.padded, ...]`.

    Args:
        tensor: `[rows.own, ...]`, at least one row.
        rows: The numbers of rows.

    Example:
        >>> repeat_last_row(tf.constant([1, 2]), Rows(tf.constant(2), tf.constant(4))).numpy().tolist()
        [1, 2, 2, 2]
    """
    with tf.device("CPU:0"):
        numbers = tf.minimum(tf.range(rows.padded), rows.own - 1)
    return tf.gather(tensor, numbers)


def add_zero_rows(tensor: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Return a tensor with rows of zeros after its own, `[rows.padded, ...]`.

    Args:
        tensor: `[rows.own, ...]`.
        rows: The numbers of rows.

    Example:
        >>> add_zero_rows(tf.constant([1, 2]), Rows(tf.constant(2), tf.constant(4))).numpy().tolist()
        [1, 2, 0, 0]
    """
    with tf.device("CPU:0"):
        of_rows = [[0, rows.padded - rows.own]]
        paddings = tf.concat([of_rows, tf.zeros([tensor.shape.rank - 1, 2], rows.own.dtype)], 0)
    return tf.pad(tensor, paddings)


def fixed_shape(spec: Any) -> bool:
    """Return whether all examples have the same shape, so that a smaller batch, padded, needs no more memory.

    Args:
        spec: Of an input of the model, `[None, ...]`.
    """
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank) and spec.shape[1:].is_fully_defined()
