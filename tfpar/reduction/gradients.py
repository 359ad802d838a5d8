"""All-reduce of gradients over the replicas of a step: dense gradients in packs, optionally compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def all_reduce_gradients(
    gradients: Sequence[Any], pack_bytes: int | None = None, compression: str | None = None
) -> list[Any]:
    """Sum each gradient over all replicas; a `None` stays one.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of this replica, one a variable.
        pack_bytes: Dense gradients are concatenated into packs of up to this many bytes, so that there are few large
            messages; None sends each separately.
        compression: The dtype to which dense gradients are rounded before they are sent, except scalars; None
            rounds none.

    Returns:
        The sums, in the order of `gradients`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if compression is not None:  # scalars are not rounded, and a pack has one dtype
        scalars = [index for index in present if gradients[index].shape.rank == 0]
        packs = [[index] for index in scalars]
        packs += _packs(gradients, [index for index in present if index not in scalars], pack_bytes)
    else:
        packs = _packs(gradients, present, pack_bytes)
    messages = [
        gradients[pack[0]] if len(pack) == 1 else tf.concat([tf.reshape(gradients[i], [-1]) for i in pack], 0)
        for pack in packs
    ]
    sums = list(gradients)
    sent = [_rounded(message, compression) for message in messages]
    reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, sent) if sent else []
    reduced = [_rounded(total, message.dtype) for total, message in zip(reduced, messages, strict=True)]
    for pack, message in zip(packs, reduced, strict=True):
        if len(pack) == 1:
            sums[pack[0]] = message
            continue
        parts = tf.split(message, [gradients[i].shape.num_elements() for i in pack])
        for i, part in zip(pack, parts, strict=True):
            sums[i] = tf.reshape(part, gradients[i].shape)
    return sums


def _rounded(message: Any, dtype: Any) -> Any:
    stays = dtype is None or isinstance(message, tf.IndexedSlices) or message.shape.rank == 0
    return message if stays else tf.cast(message, dtype)


def _packs(gradients: Sequence[Any], present: Sequence[int], pack_bytes: int | None) -> list[list[int]]:
    """Group dense gradients of a dtype into packs of at most `pack_bytes`; a larger gradient is a separate pack."""
    packs: list[list[int]] = []
    open_packs: dict[tf.DType, tuple[list[int], int]] = {}
    for index in present:
        gradient = gradients[index]
        is_sparse = isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined()
        size_bytes = 0 if is_sparse else gradient.shape.num_elements() * gradient.dtype.size
        if pack_bytes is None or is_sparse or size_bytes > pack_bytes:
            packs.append([index])
            continue
        pack, used_bytes = open_packs.get(gradient.dtype, ([], 0))
        if not pack or used_bytes + size_bytes > pack_bytes:
            pack, used_bytes = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[gradient.dtype] = pack, used_bytes + size_bytes
    return packs
