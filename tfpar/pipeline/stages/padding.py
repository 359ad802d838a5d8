"""Padding of micro-batches to a fixed size, so that XLA compiles each pass of a stage once.

    10 examples     micro-batches of 3 3 2 2     ─►  3 3 3 3     F  repeats the last row, and drops the added outputs
    a last batch of 5 examples       2 1 1 1     ─►  3 3 3 3     B  uses zero gradients for the added rows

XLA compiles a function for each shape of its arguments. Added rows are copies, so that they cause no new infinities or
NaNs, and have no loss, so that their gradients are exactly zero. Only stages that compute each row independently are
padded: added rows must not affect a loss, metric or statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.pipeline.stages.trace import StageTrace
from tfpar.reduction.gradients.gradient_addition import reached_from

_NUM_ROWS = 997  # a size that no layer is likely to have otherwise


def can_pad(trace: StageTrace, per_example: Sequence[bool], *, with_lookups: bool) -> bool:
    """Return whether added rows leave the other results of a stage unchanged.

    The layers are known to be independent of the batch. Added losses, metrics and moving statistics are not. A seed is
    a state too, but does not depend on the rows.

    Args:
        trace: The graph of the stage.
        per_example: Whether each output of the stage has one row for each example.
        with_lookups: Whether padding may add rows of zeros to sparse gradients.
    """
    is_sparse = any(isinstance(gradient, tuple) for gradient in trace.backward.weight_gradients)
    if trace.losses or trace.ways or not trace.values or not all(per_example) or (is_sparse and not with_lookups):
        return False
    row_ops = reached_from(trace.values)
    return not any(new is not None and new.op in row_ops for new in trace.new_states)


def outputs_per_example(trace: StageTrace, forward: Subgraph) -> list[bool]:
    """Return whether each output of a stage, and its mask, has one row for each example.

    This is true if TensorFlow infers as many rows for the outputs as the inputs have.

    Args:
        trace: The graph of the stage.
        forward: Its forward pass.
    """
    values = {value.ref() for value in trace.values}
    specs = [
        tf.TensorSpec([_NUM_ROWS, *tensor.shape[1:]] if tensor.ref() in values else tensor.shape, tensor.dtype)
        for tensor in forward.inputs
    ]
    try:
        inferred = forward.shapes(specs)
    except ValueError:  # a layer does not support this number of examples
        return [False] * len(trace.outputs)
    num_rows: dict[Any, int | None] = dict.fromkeys(values, _NUM_ROWS)  # an output may be an input
    num_rows |= {ref: shape[0] if shape.rank else None for ref, shape in inferred.items()}

    def is_per_example(tensor: Any) -> bool:
        return is_dense(tensor) and tensor.shape[0] is None and num_rows.get(tensor.ref()) == _NUM_ROWS

    pairs = zip(trace.outputs, trace.masks, strict=True)
    return [is_per_example(output) and (mask is None or is_per_example(mask)) for output, mask in pairs]


def is_dense(tensor: Any) -> bool:
    """Return whether a value is a dense tensor with at least one axis."""
    return isinstance(tensor, tf.Tensor) and bool(tensor.shape.rank)


class Rows(NamedTuple):
    """The size of a micro-batch.

    Args:
        own: Number of its own rows, an int64 scalar.
        padded: Number of rows including padding, an int64 scalar.
    """

    own: tf.Tensor
    padded: tf.Tensor


def repeat_last_row(tensor: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Pad a tensor with copies of its last row, to `[rows.padded, ...]`.

    Args:
        tensor: `[rows.own, ...]`, at least one row.
        rows: The numbers of rows.

    Example:
        >>> repeat_last_row(tf.constant([1, 2]), Rows(tf.constant(2), tf.constant(4))).numpy().tolist()
        [1, 2, 2, 2]
    """
    with tf.device("CPU:0"):
        indices = tf.minimum(tf.range(rows.padded), rows.own - 1)
    return tf.gather(tensor, indices)


def add_zero_rows(tensor: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Pad a tensor with rows of zeros, to `[rows.padded, ...]`.

    Args:
        tensor: `[rows.own, ...]`.
        rows: The numbers of rows.

    Example:
        >>> add_zero_rows(tf.constant([1, 2]), Rows(tf.constant(2), tf.constant(4))).numpy().tolist()
        [1, 2, 0, 0]
    """
    with tf.device("CPU:0"):
        row_padding = [[0, rows.padded - rows.own]]
        paddings = tf.concat([row_padding, tf.zeros([tensor.shape.rank - 1, 2], rows.own.dtype)], 0)
    return tf.pad(tensor, paddings)


def fixed_shape(spec: Any) -> bool:
    """Return whether all examples of an input have the same shape, so that padding needs no additional memory."""
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank) and spec.shape[1:].is_fully_defined()
