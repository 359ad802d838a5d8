"""All-reduce of gradients over the replicas of a step: dense gradients in packs, optionally compressed.

    backward pass   │ layer 3 │ layer 2 │ layer 1 │
    all-reduce                │ layer 3 │ layer 2 │ layer 1 │

The all-reduces begin in the order of the backward pass, that of the last layer first, on every replica. Operations with
one ordering token, or on one NCCL stream, run in the order of the graph: an all-reduce of the first layer in front
would delay all others until the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

Sums = Mapping[int, Callable[[], tf.Tensor]]


def all_reduce_gradients(
    gradients: Sequence[Any],
    pack_bytes: int | None = None,
    compression: str | None = None,
    own_sums: Sums | None = None,
) -> list[Any]:
    """Sum each gradient over all replicas; a `None` stays one.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of this replica, one a variable, in the order of the layers.
        pack_bytes: Dense gradients are concatenated into packs of up to this many bytes, so that there are few large
            messages; None sends each separately.
        compression: The dtype to which dense gradients are rounded before they are sent, except scalars; None
            rounds none.
        own_sums: For some gradients, by number, a function that sums them over all replicas in another way, possibly
            on one replica alone. It is called in their turn.

    Returns:
        The sums, in the order of `gradients`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)

    def all_reduce(message: Any) -> Any:
        # One call for each message: TensorFlow 2.21 joins the results of a call in one IdentityN. The graph optimizer
        # takes it for a path from each message to each sum, removes control edges as redundant, and then the IdentityN.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, message)

    return sum_in_packs(gradients, all_reduce, pack_bytes, compression, own_sums)


def sum_in_packs(
    gradients: Sequence[Any],
    all_reduce: Callable[[Any], Any],
    pack_bytes: int | None = None,
    compression: str | None = None,
    own_sums: Sums | None = None,
) -> list[Any]:
    """Sum each gradient with a function for one message.

    Args:
        gradients: As for `all_reduce_gradients`.
        all_reduce: Returns the sum of a message, a tensor or `tf.IndexedSlices`, over all members.
        pack_bytes: As for `all_reduce_gradients`.
        compression: As for `all_reduce_gradients`.
        own_sums: As for `all_reduce_gradients`.
    """
    sums: dict[int, Any] = {}
    others = own_sums or {}
    for pack in _packs(gradients, others, pack_bytes, compression):
        if pack[0] in others:
            sums[pack[0]] = others[pack[0]]()
            continue
        message = _message(gradients, pack)
        total = all_reduce(rounded(message, compression))
        sums.update(_parts(rounded(total, message.dtype), gradients, pack))
    return [sums.get(index) for index in range(len(gradients))]


def _parts(total: Any, gradients: Sequence[Any], pack: Sequence[int]) -> dict[int, Any]:
    """Return the sums of the gradients of a pack from the sum of its message."""
    if len(pack) == 1 and not _is_matrix(gradients[pack[0]]):
        return {pack[0]: total}
    parts = tf.split(total, [gradients[index].shape.num_elements() for index in pack]) if len(pack) > 1 else [total]
    return {index: tf.reshape(part, gradients[index].shape) for index, part in zip(pack, parts, strict=True)}


def as_vector(message: tf.Tensor) -> tf.Tensor:
    """Return a message as a vector.

    TensorFlow 2.21's executor runs a cheap operation, such as a reshape, at once, and the collective after it. As an
    output of the expensive operation that computes the message, the collective would wait in the queue of the threads:
    with one thread, for the end of the backward pass.
    """
    return tf.reshape(message, [-1])


def _message(gradients: Sequence[Any], pack: Sequence[int]) -> Any:
    if len(pack) > 1:
        return tf.concat([as_vector(gradients[index]) for index in pack], 0)
    return as_vector(gradients[pack[0]]) if _is_matrix(gradients[pack[0]]) else gradients[pack[0]]


def _is_matrix(gradient: Any) -> bool:
    return not isinstance(gradient, tf.IndexedSlices) and gradient.shape.is_fully_defined() and gradient.shape.rank > 1


def rounded(message: Any, dtype: Any) -> Any:
    """Return a message, or its sum, in another dtype; a scalar, indexed slices and any with None stay as they are.

    Args:
        message: A tensor or `tf.IndexedSlices`.
        dtype: The dtype; None rounds none.

    Example:
        >>> rounded(tf.zeros([2]), "bfloat16").dtype
        tf.bfloat16
    """
    stays = dtype is None or isinstance(message, tf.IndexedSlices) or message.shape.rank == 0
    return message if stays else tf.cast(message, dtype)


def _packs(
    gradients: Sequence[Any], others: Mapping[int, Any], pack_bytes: int | None, compression: str | None
) -> list[list[int]]:
    """Group gradients into packs, in the order in which the backward pass completes them.

    Dense gradients of a dtype form packs of at most `pack_bytes`, a larger gradient is a separate pack, and so is a
    gradient of `others`. Small gradients, such as those of biases, do not begin a new pack after each large one: few
    messages matter more than an early one of some kilobytes.
    """
    packs: list[list[int]] = []
    open_packs: dict[tf.DType, tuple[list[int], int]] = {}
    for index in reversed(range(len(gradients))):
        gradient = gradients[index]
        if gradient is None and index not in others:
            continue
        if pack_bytes is None or index in others or not _is_packed(gradient, compression):
            packs.append([index])
            continue
        size_bytes = gradient.shape.num_elements() * gradient.dtype.size
        pack, used_bytes = open_packs.get(gradient.dtype, ([], 0))
        if size_bytes > pack_bytes:
            packs.append([index])
            continue
        if not pack or used_bytes + size_bytes > pack_bytes:
            pack, used_bytes = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[gradient.dtype] = pack, used_bytes + size_bytes
    return sorted(packs, key=min, reverse=True)


def _is_packed(gradient: Any, compression: str | None) -> bool:
    """Return whether a gradient may share a message: it is dense, and rounded as the others of its pack."""
    if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
        return False
    return compression is None or gradient.shape.rank > 0
