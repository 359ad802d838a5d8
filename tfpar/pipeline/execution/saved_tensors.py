"""What a micro-batch keeps on a stage between the pieces of its forward and backward pass, in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.pipeline.execution.subgraphs import Subgraph

_LOOKS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")


class SavedBytes(NamedTuple):
    """What one micro-batch keeps on a stage, in bytes.

    Args:
        activation: From its forward pass to the end of its backward pass.
        backward: What the backward pass, or its part for the inputs, makes again and has besides while it runs.
        weight_gradient: The same of its part for the weights.
        waiting: From the end of its part for the inputs to the end of that for the weights.
    """

    activation: int
    backward: int
    weight_gradient: int
    waiting: int


def kept_between(
    before: Sequence[tf.Tensor], later: Sequence[Subgraph], upstream: Sequence[tf.Tensor], num_examples: int
) -> SavedBytes:
    """Return what the pieces of a backward pass keep from a forward pass and from each other.

    Args:
        before: What the forward pass takes and gives.
        later: The backward pass: one piece, or that for the inputs and that for the weights.
        upstream: The gradients that the backward pass begins with.
        num_examples: Of the micro-batch.
    """
    first, *others = later
    taken = [tensor for piece in later for tensor in piece.takes]
    handed_on = [tensor for piece in others for tensor in piece.takes]
    return SavedBytes(
        _bytes(_among(before, taken), num_examples),
        _made_again(first, num_examples),
        sum(_made_again(piece, num_examples) for piece in others),
        _bytes(_among([*first.gives, *upstream], handed_on), num_examples),
    )


def _among(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    references = {tensor.ref() for tensor in tensors}
    return [tensor for tensor in others if tensor.ref() in references]


def _made_again(piece: Subgraph, num_examples: int) -> int:
    taken = {tensor.ref() for tensor in piece.takes}
    return _bytes([tensor for tensor in map(_buffer, piece.again) if tensor.ref() not in taken], num_examples)


def _bytes(tensors: Sequence[tf.Tensor], num_examples: int) -> int:
    buffers = {buffer.ref(): buffer for buffer in map(_buffer, tensors)}
    return sum(_bytes_of(buffer, num_examples) for buffer in buffers.values())


def _buffer(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor whose memory a tensor is another look at."""
    while tensor.op.type in _LOOKS:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes_of(tensor: tf.Tensor, num_examples: int) -> int:
    sizes = (tensor.shape or ()) if tensor.shape.rank is not None else ()
    known = [num_examples if axis == 0 and size is None else size or 1 for axis, size in enumerate(sizes)]
    return math.prod(known) * int(max(tensor.dtype.size, 1))
