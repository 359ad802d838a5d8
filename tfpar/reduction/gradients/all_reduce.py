"""All-reduce of gradients over replicas, in packs and optionally compressed.

    backward pass   │ layer 3 │ layer 2 │ layer 1 │
    all-reduce                │ layer 3 │ layer 2 │ layer 1 │

Every replica starts the all-reduces in the order of the backward pass, last layer first. Operations with one ordering
token, or on one NCCL stream, run in the order of the graph: an all-reduce of the first layer in front would delay all
others until the backward pass ends.
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
    """Sum each gradient over all replicas; None stays None.

    Args:
        gradients: The gradient of each variable on this replica, a tensor or `tf.IndexedSlices`, in layer order.
        pack_bytes: Dense gradients are concatenated into messages of up to this many bytes; None sends each alone.
        compression: The dtype to which dense gradients except scalars are rounded for the transfer; None for no
            rounding.
        own_sums: Functions that replace the all-reduce of some gradients, by index.

    Returns:
        The sums, in the order of `gradients`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)

    def all_reduce(message: Any) -> Any:
        # One call for each message: TensorFlow 2.21 joins the results of one call in an IdentityN. The graph optimizer
        # takes it for a path from each message to each sum, and removes control edges as redundant.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, message)

    return sum_in_packs(gradients, all_reduce, pack_bytes, compression, own_sums)


def sum_in_packs(
    gradients: Sequence[Any],
    all_reduce: Callable[[Any], Any],
    pack_bytes: int | None = None,
    compression: str | None = None,
    own_sums: Sums | None = None,
) -> list[Any]:
    """Sum each gradient with `all_reduce`, a function of one message; other arguments as for `all_reduce_gradients`."""
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
    """Split the sum of a message into the sums of the gradients in its pack."""
    if len(pack) == 1 and not _is_matrix(gradients[pack[0]]):
        return {pack[0]: total}
    parts = tf.split(total, [gradients[index].shape.num_elements() for index in pack]) if len(pack) > 1 else [total]
    return {index: tf.reshape(part, gradients[index].shape) for index, part in zip(pack, parts, strict=True)}


def as_vector(message: tf.Tensor) -> tf.Tensor:
    """Flatten a message, so that its collective starts early.

    TensorFlow 2.21's executor runs a cheap operation such as a reshape at once, and then the collective. Directly after
    the expensive operation that computes the message, the collective would be queued: with one thread, until the end of
    the backward pass.
    """
    return tf.reshape(message, [-1])


def _message(gradients: Sequence[Any], pack: Sequence[int]) -> Any:
    if len(pack) > 1:
        return tf.concat([as_vector(gradients[index]) for index in pack], 0)
    return as_vector(gradients[pack[0]]) if _is_matrix(gradients[pack[0]]) else gradients[pack[0]]


def _is_matrix(gradient: Any) -> bool:
    return not isinstance(gradient, tf.IndexedSlices) and gradient.shape.is_fully_defined() and gradient.shape.rank > 1


def rounded(message: Any, dtype: Any) -> Any:
    """Cast a message or its sum; scalars and `tf.IndexedSlices` stay as they are, and so does all if `dtype` is None.

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

    Dense gradients of one dtype share packs of at most `pack_bytes`. A larger gradient, and each of `others`, is a pack
    of its own. Small gradients, such as those of biases, do not begin a new pack after each large one: few messages
    matter more than an early one of some kilobytes.
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
    """Return whether a gradient may share a message: it is dense, and rounded like the others."""
    if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
        return False
    return compression is None or gradient.shape.rank > 0
