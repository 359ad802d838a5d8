"""Sums of gradients between two replicas, each on the owner of its weight alone, with half the bytes of an all-reduce.

    replica 0 owns a    │ b c │ ──┐    ┌──►  its own gradient of a      + the one of replica 1
    replica 1 owns b c  │ a 0 │ ──┴────┴──►  its own gradients of b c   + those of replica 0
                      all-gather

The sum of two numbers has the same bits in either order. With more replicas it depends on the order of TensorFlow's
ring, which these sums could not keep.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import GATHERABLE, Group
from tfpar.strategies.multi_worker.weight_exchange import packs_of


def sums_on_owners(
    gradients: Sequence[Any],
    owners: Sequence[int],
    group: Group,
    member: int,
    own: int,
    pack_bytes: int,
    compression: str | None = None,
) -> dict[int, Callable[[], tf.Tensor]]:
    """Return functions that sum gradients over two replicas, for `tfpar.reduction.gradients.sum_in_packs`.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, in the order of the layers; those with owners first.
        owners: The owner of the weight of each gradient, 0 or 1; none of the gradients has a function without owners.
        group: All replicas; there are functions only if they are two.
        member: The number of the calling replica in this process.
        own: Its number among all replicas.
        pack_bytes: The most bytes of the rows of an all-gather.
        compression: The dtype to which gradients are rounded before they are sent; None rounds none.

    Returns:
        For the number of each dense gradient that an all-gather can send, a function with its sum on the owner, and the
        gradient itself on the other replica.

    Example:
        >>> sums_on_owners([tf.zeros([4])], [0], Group(["CPU:0"], num_members=3), 0, 0, pack_bytes=1 << 20)
        {}
    """
    if group.num_members != 2:
        return {}
    of_types: dict[tf.DType, dict[int, tf.Tensor]] = collections.defaultdict(dict)
    for number in reversed(range(len(owners))):  # in the order in which the backward pass completes them
        gradient = gradients[number]
        if isinstance(gradient, tf.Tensor) and gradient.shape.rank and gradient.shape.num_elements():
            sent = gradient if compression is None else tf.cast(gradient, compression)
            if sent.dtype in GATHERABLE:
                of_types[sent.dtype][number] = sent
    found: dict[int, Callable[[], tf.Tensor]] = {}
    for sent in of_types.values():
        sums = _OwnerSums(sent, owners, group, member, own, pack_bytes)
        found |= {number: functools.partial(_of_dtype, sums, number, gradients[number].dtype) for number in sent}
    return found


def _of_dtype(sums: _OwnerSums, number: int, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(sums.of(number), dtype)


class _OwnerSums:
    """The sums of the gradients of one dtype; each message is added to the graph when a sum first needs it.

    Args:
        gradients: Gradients by number, in the order of the messages.
        owners: As for `sums_on_owners`, as are the others.
    """

    def __init__(
        self,
        gradients: Mapping[int, tf.Tensor],
        owners: Sequence[int],
        group: Group,
        member: int,
        own: int,
        pack_bytes: int,
    ) -> None:
        self._gradients, self._owners = gradients, owners
        self._group, self._member, self._own = group, member, own
        numbers = list(gradients)
        sizes = [gradient.shape.num_elements() for gradient in gradients.values()]
        most = max(1, pack_bytes // (2 * next(iter(gradients.values())).dtype.size))
        packs = packs_of(sizes, [1 - owners[number] for number in numbers], 2, most)
        self._packs = [
            [[piece._replace(weight=numbers[piece.weight]) for piece in row] for row in pack] for pack in packs
        ]
        self._last_pack = {
            piece.weight: place for place, pack in enumerate(self._packs) for row in pack for piece in row
        }
        self._received: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        self._num_sent = 0

    def of(self, number: int) -> tf.Tensor:
        """Return the sum of a gradient on the owner of its weight, and the gradient itself elsewhere."""
        while self._num_sent <= self._last_pack[number]:
            self._send(self._packs[self._num_sent])
            self._num_sent += 1
        gradient = self._gradients[number]
        if self._owners[number] != self._own:
            return gradient
        return gradient + tf.reshape(tf.concat(self._received[number], 0), gradient.shape)

    def _send(self, pack: Sequence[Sequence[Any]]) -> None:
        """Send the pieces of this replica, and keep those of the other one."""
        lengths = [sum(piece.stop - piece.start for piece in row) for row in pack]
        parts = [tf.reshape(self._gradients[one.weight], [-1])[one.start : one.stop] for one in pack[self._own]]
        parts.append(tf.zeros([max(lengths) - lengths[self._own]], next(iter(self._gradients.values())).dtype))
        rows = self._group.all_gather_equal_shapes(tf.concat(parts, 0), self._member)
        other = 1 - self._own
        place = other * max(lengths)
        for piece in pack[other]:
            size = piece.stop - piece.start
            self._received[piece.weight].append(rows[place : place + size])
            place += size
