"""Sums of gradients between two replicas, each on the owner of its weight alone.

    replica 0 owns a    │ b c │ ──┐    ┌──►  its own gradient of a      + the one of replica 1
    replica 1 owns b c  │ a 0 │ ──┴────┴──►  its own gradients of b c   + those of replica 0
                      all-gather

With equal rows that is half the bytes of an all-reduce. The sum of two numbers has the same bits in either order. With
more replicas it depends on the order of TensorFlow's ring, which these sums could not keep.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import NUM_STREAMS, REDUCIBLE, Group
from tfpar.strategies.multi_worker.weight_exchange import Piece, num_elements, padded_row

# The part of all gradients that may wait for a gradient of the other owner, to share a message with it.
_WAITING_PART = 1 / 8
Pack = tuple[list[Piece], list[Piece]]


def sums_on_owners(
    gradients: Sequence[Any],
    owners: Sequence[int],
    group: Group,
    member: int,
    rank: int,
    pack_bytes: int,
    compression: str | None = None,
) -> dict[int, Callable[[], tf.Tensor]]:
    """Return functions that sum gradients over two replicas, for `tfpar.reduction.gradients.sum_in_packs`.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, in the order of the layers; those with owners first.
        owners: The owner of the weight of each gradient, 0 or 1; a gradient without one has no function.
        group: All replicas; there are functions only if they are two.
        member: The number of the calling replica in this process.
        rank: Its number among all replicas.
        pack_bytes: The most bytes of the rows of an all-gather.
        compression: The dtype to which gradients are rounded before they are sent; None rounds none.

    Returns:
        For the number of each dense gradient, a function with its sum on the owner, and on the other replica the
        gradient itself, which no one may take for the sum.

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
            if sent.dtype in REDUCIBLE:
                of_types[sent.dtype][number] = sent
    found: dict[int, Callable[[], tf.Tensor]] = {}
    for dtype, sent in of_types.items():
        sums = _OwnerSums(sent, owners, group, member, rank, max(1, pack_bytes // (2 * dtype.size)))
        found |= {number: functools.partial(_sum_as, sums, number, gradients[number].dtype) for number in sent}
    return found


def _sum_as(sums: _OwnerSums, number: int, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(sums.of(number), dtype)


def packs_in_order(sizes: Sequence[int], senders: Sequence[int], most_elements: int) -> list[Pack]:
    """Return the pieces that each of two replicas sends in each message.

    A message has full rows of both replicas. Where one of them has much more to send for now, its row goes alone: no
    more than an eighth of all gradients waits for gradients of layers that come later.

    Args:
        sizes: The number of elements of each gradient, in the order in which they are completed.
        senders: The replica that sends each one, 0 or 1.
        most_elements: The most elements of a row.

    Example:
        >>> packs_in_order([3, 2], [0, 1], most_elements=2)[1]
        ([Piece(weight=0, start=2, stop=3)], [Piece(weight=1, start=0, stop=2)])
    """
    packs: list[Pack] = []
    waiting: Pack = ([], [])
    most_waiting = max(most_elements, int(sum(sizes) * _WAITING_PART))
    for number, (size, sender) in enumerate(zip(sizes, senders, strict=True)):
        waiting[sender].append(Piece(number, 0, size))
        while min(map(num_elements, waiting)) >= most_elements or max(map(num_elements, waiting)) > most_waiting:
            packs.append((_taken(waiting[0], most_elements), _taken(waiting[1], most_elements)))
    while any(waiting):
        packs.append((_taken(waiting[0], most_elements), _taken(waiting[1], most_elements)))
    return packs


def _taken(waiting: list[Piece], most_elements: int) -> list[Piece]:
    """Remove the first elements from a row, at most some, and return them."""
    found, room = [], most_elements
    while waiting and room:
        piece = waiting.pop(0)
        stop = min(piece.stop, piece.start + room)
        found.append(piece._replace(stop=stop))
        room -= stop - piece.start
        if stop < piece.stop:
            waiting.insert(0, piece._replace(start=stop))
    return found


class _OwnerSums:
    """The sums of the gradients of one dtype; each message is added to the graph when a sum first needs it.

    Args:
        gradients: Gradients by number, in the order in which they are completed.
        owners: As for `sums_on_owners`, as are `group`, `member` and `rank`.
        most_elements: The most elements of a replica in a message.
    """

    def __init__(
        self,
        gradients: Mapping[int, tf.Tensor],
        owners: Sequence[int],
        group: Group,
        member: int,
        rank: int,
        most_elements: int,
    ) -> None:
        self._gradients, self._owners = gradients, owners
        self._group, self._member, self._rank = group, member, rank
        self._dtype = next(iter(gradients.values())).dtype
        self._vectors = {number: tf.reshape(gradient, [-1]) for number, gradient in gradients.items()}
        numbers, sizes = list(gradients), [gradient.shape.num_elements() for gradient in gradients.values()]
        packs = packs_in_order(sizes, [1 - owners[number] for number in numbers], most_elements)
        self._packs = [
            [[piece._replace(weight=numbers[piece.weight]) for piece in row] for row in pack] for pack in packs
        ]
        self._last_pack = {
            piece.weight: place for place, pack in enumerate(self._packs) for row in pack for piece in row
        }
        self._sums: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        self._num_sent = 0
        self._received: collections.deque[tf.Tensor] = collections.deque(maxlen=NUM_STREAMS)

    def of(self, number: int) -> tf.Tensor:
        """Return the sum of a gradient on the owner of its weight, and the gradient itself elsewhere."""
        while self._num_sent <= self._last_pack[number]:
            self._send(self._packs[self._num_sent])
            self._num_sent += 1
        if self._owners[number] != self._rank:
            return self._gradients[number]
        pieces = self._sums.pop(number)
        return tf.reshape(pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0), self._gradients[number].shape)

    def _send(self, pack: Sequence[Sequence[Piece]]) -> None:
        """Send the pieces of this replica, and add those of the other one."""
        length = max(map(num_elements, pack))
        # Else copies of all gradients would be in memory, each from the moment when its gradient is there.
        first_sent = [self._received[0]] if len(self._received) == NUM_STREAMS else []
        with tf.control_dependencies(first_sent):
            message = padded_row(self._vectors, pack[self._rank], length, self._dtype)
        rows = self._group.all_gather_equal_shapes(message, self._member)
        self._received.append(rows)
        other = 1 - self._rank
        place = other * length
        for piece in pack[other]:
            size = piece.stop - piece.start
            self._sums[piece.weight].append(self._piece(piece) + rows[place : place + size])
            place += size

    def _piece(self, piece: Piece) -> tf.Tensor:
        return self._vectors[piece.weight][piece.start : piece.stop]
