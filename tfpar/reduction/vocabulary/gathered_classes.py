"""Scores of classes that Keras sees as one tensor, and that losses and metrics read in pieces.

    device 0   piece ─┐                 ┌─ cross-entropy, argmax, top k: from the pieces
                      ├─ whole tensor ──┤
    device 1   piece ─┘                 └─ anything else: gathered, on the first device

The whole tensor is the concatenation of the pieces. TensorFlow computes no operation that nothing reads, so the pieces
are gathered only where a loss or a metric reads the tensor in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.variables import keras_class_shards
from tfpar.reduction.vocabulary import vocabulary_losses, vocabulary_metrics
from tfpar.reduction.vocabulary.vocabulary_losses import ClassShards

_ATTRIBUTE = "_tfpar_class_pieces"


def note_shards(tensor: tf.Tensor, pieces: ClassShards) -> tf.Tensor:
    """Note that a tensor is the concatenation of pieces along its last axis; return it.

    Args:
        tensor: A tensor `[..., classes]` of a graph.
        pieces: Its pieces.
    """
    if tf.is_symbolic_tensor(tensor):
        setattr(tensor.op, _ATTRIBUTE, pieces)
    return tensor


def joined(pieces: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """Return pieces along the last axis as one tensor on the first device, and note them.

    Args:
        pieces: Tensors `[..., size]`.
        devices: The device of each.
    """
    placed = []
    for piece, device in zip(pieces, devices, strict=True):
        with tf.device(device):  # an argument of a function has none
            placed.append(tf.identity(piece))
    with tf.device(devices[0]):
        whole = tf.concat(placed, -1)
    return note_shards(whole, ClassShards(placed, devices))


def pieces_of(tensor: Any) -> ClassShards | None:
    """Return the pieces of a tensor that was noted, or computed from such a tensor class by class; None for another.

    Args:
        tensor: Any tensor.
    """
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor) or tensor.shape.rank is None:
        return None
    op = tensor.op
    noted: ClassShards | None = getattr(op, _ATTRIBUTE, None)
    if noted is not None or op.type not in _OF_EACH_PIECE or op.inputs[0].shape.rank in (None, 0):
        return noted
    before = pieces_of(op.inputs[0]) if op.inputs[0].shape[-1] == tensor.shape[-1] else None
    return None if before is None else _OF_EACH_PIECE[op.type](before, tensor)


def are_probabilities(tensor: Any) -> bool:
    """Return whether a tensor is that of a softmax, which has pieces of its own where its logits have them.

    Args:
        tensor: Any tensor.
    """
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
        return False
    op = tensor.op
    while op.type in _OF_EACH_PIECE and op.type != "Softmax":
        op = op.inputs[0].op
    return bool(op.type == "Softmax")


def _reshaped(pieces: ClassShards, tensor: tf.Tensor) -> ClassShards:
    leading = tensor.op.inputs[1][:-1]

    def reshape(piece: tf.Tensor) -> tf.Tensor:
        return tf.reshape(piece, tf.concat([leading, [tf.cast(piece.shape[-1], leading.dtype)]], 0))

    return pieces.map(reshape)


def _cast(pieces: ClassShards, tensor: tf.Tensor) -> ClassShards:
    return pieces.map(lambda piece: tf.cast(piece, tensor.dtype))


_OF_EACH_PIECE: dict[str, Callable[[ClassShards, tf.Tensor], ClassShards]] = {
    "Identity": lambda pieces, tensor: pieces,
    "Cast": _cast,
    "Reshape": _reshaped,
    "Softmax": lambda pieces, tensor: vocabulary_losses.softmax(pieces),
}


def read_in_pieces() -> contextlib.AbstractContextManager[None]:
    """Return a context in which losses and metrics of Keras read the pieces of tensors that have them."""
    return keras_class_shards.computed_by(_sparse, _dense, _argmax, _in_top_k, _shape)


def _sparse(original: Any, target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
    valid = None
    if _is_selected(output):  # Keras sets the logits of ignored positions to zero
        valid, output = tf.squeeze(output.op.inputs[0], -1), output.op.inputs[1]
    pieces = _logits(output, from_logits, axis, is_sparse=True)
    if pieces is None:
        return original(target, output, from_logits=from_logits, axis=axis)
    labels = tf.cast(target, tf.int64)
    if labels.shape.rank == output.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    return vocabulary_losses.sparse_losses(labels, pieces, valid)


def _dense(original: Any, target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
    pieces = _logits(output, from_logits, axis, is_sparse=False)
    if pieces is None:
        return original(target, output, from_logits=from_logits, axis=axis)
    with tf.device(pieces.devices[0]):
        labels = tf.split(tf.cast(target, pieces.tensors[0].dtype), pieces.sizes, -1)
    return vocabulary_losses.dense_losses(pieces._replace(tensors=labels), pieces)


def _logits(output: Any, from_logits: bool, axis: int, *, is_sparse: bool) -> ClassShards | None:
    if not tf.is_tensor(output) or axis not in (-1, len(output.shape) - 1):
        return None
    if pieces_of(output) is None:
        return None
    logits, are_logits = keras_class_shards.logits_of(output, from_logits, is_sparse)
    return pieces_of(logits) if are_logits else None


def _is_selected(output: Any) -> bool:
    """Return whether a tensor has the logits of some positions, and one value for all classes of the others."""
    if not isinstance(output, tf.Tensor) or not tf.is_symbolic_tensor(output) or output.op.type != "SelectV2":
        return False
    condition, selected, other = output.op.inputs
    if condition.shape.rank != selected.shape.rank or other.shape.rank != 0:
        return False
    return condition.shape[-1] == 1 and pieces_of(selected) is not None


def _argmax(original: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    pieces = pieces_of(x) if axis is not None and not keepdims and axis in (-1, len(x.shape) - 1) else None
    if pieces is None:
        return original(x, axis=axis, keepdims=keepdims)
    return vocabulary_metrics.argmax(pieces, lambda piece: original(piece, axis=-1))


def _in_top_k(original: Any, targets: Any, predictions: Any, k: Any) -> Any:
    pieces = pieces_of(predictions) if getattr(predictions, "dtype", None) == tf.float32 else None
    if pieces is None or predictions.shape.rank != 2:
        return original(targets, predictions, k)
    return vocabulary_metrics.in_top_k(targets, pieces, k)


def _shape(original: Any, x: Any) -> Any:
    pieces = pieces_of(x)
    return original(x) if pieces is None else (*original(pieces.tensors[0])[:-1], sum(pieces.sizes))
