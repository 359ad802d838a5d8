"""The memory of saved and recomputed tensors on a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.pipeline.stages.compiled_stage import CompiledStage
from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.reduction.gradients.gradient_addition import tensors_of

_VIEWS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")


class SavedBytes(NamedTuple):
    """The memory of one micro-batch on one stage, in bytes.

    Args:
        activations: Tensors saved from the forward pass to the end of the backward pass.
        input_gradient_temporaries: Recomputed activations during B.
        weight_gradient_temporaries: Recomputed activations during W.
        until_weight_gradient: Tensors saved from the end of B to the end of W.
    """

    activations: int
    input_gradient_temporaries: int
    weight_gradient_temporaries: int
    until_weight_gradient: int


def saved_bytes(stage: CompiledStage, microbatch_size: int) -> SavedBytes:
    """Return the memory of saved and recomputed tensors of a stage.

    Args:
        stage: A stage compiled for training.
        microbatch_size: Number of examples in a micro-batch.
    """
    forward, first, *others = stage.subgraphs
    used = [tensor for subgraph in (first, *others) for tensor in subgraph.inputs]
    used_last = [tensor for subgraph in others for tensor in subgraph.inputs]
    before = [*tensors_of(stage.trace.values), *forward.outputs]
    after_first = [*first.outputs, *tensors_of(stage.trace.backward.output_gradients)]
    return SavedBytes(
        _bytes(_among(before, used), microbatch_size),
        _recomputed_bytes(first, microbatch_size),
        sum(_recomputed_bytes(subgraph, microbatch_size) for subgraph in others),
        _bytes(_among(after_first, used_last), microbatch_size),
    )


def _among(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    references = {tensor.ref() for tensor in tensors}
    return [tensor for tensor in others if tensor.ref() in references]


def _recomputed_bytes(subgraph: Subgraph, num_examples: int) -> int:
    inputs = {tensor.ref() for tensor in subgraph.inputs}
    recomputed = [tensor for tensor in map(_buffer, subgraph.recomputed) if tensor.ref() not in inputs]
    return _bytes(recomputed, num_examples)


def _bytes(tensors: Sequence[tf.Tensor], num_examples: int) -> int:
    buffers = {buffer.ref(): buffer for buffer in map(_buffer, tensors)}
    return sum(_bytes_of(buffer, num_examples) for buffer in buffers.values())


def _buffer(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that owns the memory of a view."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes_of(tensor: tf.Tensor, num_examples: int) -> int:
    sizes = (tensor.shape or ()) if tensor.shape.rank is not None else ()
    known = [num_examples if axis == 0 and size is None else size or 1 for axis, size in enumerate(sizes)]
    return math.prod(known) * int(max(tensor.dtype.size, 1))
