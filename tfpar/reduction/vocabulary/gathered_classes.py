"""Sharded class scores that Keras sees as one tensor.

    device 0   shard ─┐                 ┌─ cross-entropy, argmax, top k: computed on the shards
                      ├─ whole tensor ──┤
    device 1   shard ─┘                 └─ anything else: reads the whole tensor on the first device

The whole tensor is the concatenation of the shards. TensorFlow prunes the concatenation unless a loss or metric reads
the tensor in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.variables import keras_class_shards
from tfpar.reduction.vocabulary import vocabulary_losses, vocabulary_metrics
from tfpar.reduction.vocabulary.vocabulary_losses import ClassShards

_ATTRIBUTE = "_tfpar_class_shards"


def note_shards(tensor: tf.Tensor, shards: ClassShards) -> tf.Tensor:
    """Record that a tensor is the concatenation of shards along its last axis, and return it.

    Args:
        tensor: A tensor `[..., classes]` of a graph.
        shards: Its shards.
    """
    if tf.is_symbolic_tensor(tensor):
        setattr(tensor.op, _ATTRIBUTE, shards)
    return tensor


def joined(shards: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """Concatenate shards along the last axis on the first device, and record them.

    Args:
        shards: Tensors `[..., size]`.
        devices: The device of each.
    """
    placed = []
    for shard, device in zip(shards, devices, strict=True):
        with tf.device(device):  # an argument of a function has none
            placed.append(tf.identity(shard))
    with tf.device(devices[0]):
        whole = tf.concat(placed, -1)
    return note_shards(whole, ClassShards(placed, devices))


def shards_of(tensor: Any) -> ClassShards | None:
    """Return the shards of a tensor that has recorded ones, or was computed elementwise from one that has; or None.

    Args:
        tensor: Any tensor.
    """
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor) or tensor.shape.rank is None:
        return None
    op = tensor.op
    noted: ClassShards | None = getattr(op, _ATTRIBUTE, None)
    if noted is not None or op.type not in _PER_SHARD or op.inputs[0].shape.rank in (None, 0):
        return noted
    before = shards_of(op.inputs[0]) if op.inputs[0].shape[-1] == tensor.shape[-1] else None
    return None if before is None else _PER_SHARD[op.type](before, tensor)


def are_probabilities(tensor: Any) -> bool:
    """Return whether a tensor is the output of a softmax.

    Args:
        tensor: Any tensor.
    """
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
        return False
    op = tensor.op
    while op.type in _PER_SHARD and op.type != "Softmax":
        op = op.inputs[0].op
    return bool(op.type == "Softmax")


def _reshaped(shards: ClassShards, tensor: tf.Tensor) -> ClassShards:
    leading = tensor.op.inputs[1][:-1]

    def reshape(shard: tf.Tensor) -> tf.Tensor:
        return tf.reshape(shard, tf.concat([leading, [tf.cast(shard.shape[-1], leading.dtype)]], 0))

    return shards.map(reshape)


def _cast(shards: ClassShards, tensor: tf.Tensor) -> ClassShards:
    return shards.map(lambda shard: tf.cast(shard, tensor.dtype))


_PER_SHARD: dict[str, Callable[[ClassShards, tf.Tensor], ClassShards]] = {
    "Identity": lambda shards, tensor: shards,
    "Cast": _cast,
    "Reshape": _reshaped,
    "Softmax": lambda shards, tensor: vocabulary_losses.softmax(shards),
}


def reading_shards() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Keras' losses and metrics use shards where a tensor has them."""
    return keras_class_shards.computed_by(_sparse, _dense, _argmax, _in_top_k, _shape)


def _sparse(original: Any, target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
    valid = None
    if _is_selected(output):  # Keras sets the logits of ignored positions to zero
        valid, output = tf.squeeze(output.op.inputs[0], -1), output.op.inputs[1]
    shards = _logits(output, from_logits, axis, is_sparse=True)
    if shards is None:
        return original(target, output, from_logits=from_logits, axis=axis)
    labels = tf.cast(target, tf.int64)
    if labels.shape.rank == output.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    return vocabulary_losses.sparse_losses(labels, shards, valid)


def _dense(original: Any, target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
    shards = _logits(output, from_logits, axis, is_sparse=False)
    if shards is None:
        return original(target, output, from_logits=from_logits, axis=axis)
    with tf.device(shards.devices[0]):
        labels = tf.split(tf.cast(target, shards.tensors[0].dtype), shards.sizes, -1)
    return vocabulary_losses.dense_losses(shards._replace(tensors=labels), shards)


def _logits(output: Any, from_logits: bool, axis: int, *, is_sparse: bool) -> ClassShards | None:
    if not tf.is_tensor(output) or axis not in (-1, len(output.shape) - 1):
        return None
    if shards_of(output) is None:
        return None
    logits, are_logits = keras_class_shards.logits_of(output, from_logits, is_sparse)
    return shards_of(logits) if are_logits else None


def _is_selected(output: Any) -> bool:
    """Return whether a tensor has logits at some positions and a constant at the others."""
    if not isinstance(output, tf.Tensor) or not tf.is_symbolic_tensor(output) or output.op.type != "SelectV2":
        return False
    condition, selected, other = output.op.inputs
    if condition.shape.rank != selected.shape.rank or other.shape.rank != 0:
        return False
    return condition.shape[-1] == 1 and shards_of(selected) is not None


def _argmax(original: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    shards = shards_of(x) if axis is not None and not keepdims and axis in (-1, len(x.shape) - 1) else None
    if shards is None:
        return original(x, axis=axis, keepdims=keepdims)
    return vocabulary_metrics.argmax(shards, lambda shard: original(shard, axis=-1))


def _in_top_k(original: Any, targets: Any, predictions: Any, k: Any) -> Any:
    shards = shards_of(predictions) if getattr(predictions, "dtype", None) == tf.float32 else None
    if shards is None or predictions.shape.rank != 2:
        return original(targets, predictions, k)
    return vocabulary_metrics.in_top_k(targets, shards, k)


def _shape(original: Any, x: Any) -> Any:
    shards = shards_of(x)
    return original(x) if shards is None else (*original(shards.tensors[0])[:-1], sum(shards.sizes))
