"""Sums of gradients between replicas, each on the owner of its weight alone.

    replica 0 owns a    │ b c to 1 │ d to 2 │ ──┐    ┌──►  the gradients of a    of all replicas
    replica 1 owns b c  │ a to 0   │ d to 2 │ ──┼────┼──►  the gradients of b c  of all replicas
    replica 2 owns d    │ a to 0   │ b c to 1 │─┴────┴──►  the gradients of d    of all replicas

With equal rows that is half the bytes of an all-reduce. Each element is added in the order in which the all-reduce of
its pack would add it, so that the sums have the same bits.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat import tf_sums
from tfpar._compat.tf_ring import Run
from tfpar.strategies.multi_worker.collectives import NUM_STREAMS, REDUCIBLE
from tfpar.strategies.multi_worker.pairs import Pairs
from tfpar.strategies.multi_worker.weight_exchange import Piece, num_elements, padded_row

# The part of all gradients that may wait for gradients of other owners, to be sent at the same time.
_WAITING_PART = 1 / 8
Rows = list[list[Piece]]  # the pieces of each owner


class Gradient(NamedTuple):
    """A gradient that is summed on one replica, or on all.

    Args:
        value: The gradient of the calling replica, rounded as it is sent.
        owner: The replica that needs the sum; None if all do.
        runs: The order in which the elements are added, from the first to the last.
    """

    value: tf.Tensor
    owner: int | None
    runs: list[Run]


def sums_on_owners(
    gradients: Sequence[Any],
    owners: Sequence[int | None],
    packs: Sequence[Sequence[int]],
    pairs: Pairs,
    rank: int,
    pack_bytes: int,
    compression: str | None = None,
) -> dict[int, Callable[[], tf.Tensor]]:
    """Return functions that sum gradients over all replicas, for `tfpar.reduction.gradients.sum_in_packs`.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, in the order of the layers.
        owners: The owner of the weight of each gradient; None for a value that all replicas need.
        packs: The numbers of the gradients of each message of an all-reduce.
        pairs: All replicas.
        rank: The number of the calling replica.
        pack_bytes: The most bytes that a replica sends at a time.
        compression: The dtype to which gradients are rounded before they are sent; None rounds none.

    Returns:
        For the number of each dense gradient, a function with its sum on the owner, and on the other replicas the
        gradient itself, which no one may take for the sum. It is empty if the order of an all-reduce is unknown, or
        if an all-reduce sends fewer bytes to other processes.

    Example:
        >>> from tfpar.strategies.multi_worker.collectives import Group
        >>> pairs = Pairs(Group(["CPU:0"], num_members=2), ["CPU:0"], first=0)
        >>> list(sums_on_owners([tf.zeros([4]), None], [0, 1], [[0]], pairs, rank=0, pack_bytes=1 << 20))
        [0]
    """
    of_types: dict[tf.DType, dict[int, Gradient]] = collections.defaultdict(dict)
    for pack in packs if pairs.sends_less else ():
        if all(map(_is_dense, (gradients[number] for number in pack))):
            for number, found in _of_pack(gradients, owners, pack, pairs, compression).items():
                of_types[found.value.dtype][number] = found
    functions: dict[int, Callable[[], tf.Tensor]] = {}
    for dtype, of_type in of_types.items():
        in_order = {number: of_type[number] for number in sorted(of_type, reverse=True)}  # as the backward pass ends
        most_elements = max(1, pack_bytes // (pairs.group.num_members * dtype.size))
        sums = _OwnerSums(in_order, pairs, rank, most_elements)
        functions |= {number: functools.partial(_sum_as, sums, number, gradients[number].dtype) for number in in_order}
    return functions


def _sum_as(sums: _OwnerSums, number: int, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(sums.of(number), dtype)


def _is_dense(gradient: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and bool(gradient.shape.num_elements())


def _of_pack(
    gradients: Sequence[Any], owners: Sequence[int | None], pack: Sequence[int], pairs: Pairs, compression: str | None
) -> dict[int, Gradient]:
    """Return the gradients of a pack with the order in which its all-reduce would add their elements."""
    rounds = compression is not None and all(gradients[number].shape.rank for number in pack)
    sent = {number: tf.cast(gradients[number], compression) if rounds else gradients[number] for number in pack}
    dtype, sizes = sent[pack[0]].dtype, [gradients[number].shape.num_elements() for number in pack]
    runs = pairs.group.order_of_sum(sum(sizes), dtype) if dtype in REDUCIBLE else None
    found, start = {}, 0
    for number, size in zip(pack, sizes, strict=True):
        if runs is not None:
            found[number] = Gradient(sent[number], owners[number], between(runs, start, start + size))
        start += size
    return found


def between(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the runs of some elements, counted from the first of these.

    Args:
        runs: The runs of a message.
        start: The first element.
        stop: The element after the last.

    Example:
        >>> between([Run(0, 4, (0, 1, 2)), Run(4, 8, (1, 2, 0))], 3, 6)
        [Run(start=0, stop=1, members=(0, 1, 2)), Run(start=1, stop=3, members=(1, 2, 0))]
    """
    return [
        Run(max(run.start, start) - start, min(run.stop, stop) - start, run.members)
        for run in runs
        if run.start < stop and start < run.stop
    ]


def packs_in_order(sizes: Sequence[int], owners: Sequence[int], num_owners: int, most_elements: int) -> list[Rows]:
    """Return the pieces of gradients that are sent at a time to each owner.

    The rows of all owners are full. Where one of them has much more to receive for now, its row is sent alone: no more
    than an eighth of all gradients waits for gradients of layers that come later.

    Args:
        sizes: The number of elements of each gradient, in the order in which they are completed.
        owners: The owner of each one.
        num_owners: The number of owners.
        most_elements: The most elements of a row.

    Example:
        >>> packs_in_order([3, 2], [0, 1], num_owners=2, most_elements=2)[1]
        [[Piece(weight=0, start=2, stop=3)], [Piece(weight=1, start=0, stop=2)]]
    """
    packs: list[Rows] = []
    waiting: Rows = [[] for _ in range(num_owners)]
    most_waiting = max(most_elements, int(sum(sizes) * _WAITING_PART))
    for number, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        waiting[owner].append(Piece(number, 0, size))
        while min(map(num_elements, waiting)) >= most_elements or max(map(num_elements, waiting)) > most_waiting:
            packs.append([_taken(row, most_elements) for row in waiting])
    while any(waiting):
        packs.append([_taken(row, most_elements) for row in waiting])
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
        pairs: As for `sums_on_owners`, as is `rank`.
        most_elements: The most elements for an owner at a time.
    """

    def __init__(self, gradients: Mapping[int, Gradient], pairs: Pairs, rank: int, most_elements: int) -> None:
        self._gradients, self._pairs, self._rank = gradients, pairs, rank
        self._members = range(pairs.group.num_members)
        self._dtype = next(iter(gradients.values())).value.dtype
        self._vectors = {number: tf.reshape(gradient.value, [-1]) for number, gradient in gradients.items()}
        owned = {number: one.owner for number, one in gradients.items() if one.owner is not None}
        numbers, sizes = list(owned), [int(self._vectors[number].shape[0]) for number in owned]
        packs = packs_in_order(sizes, list(owned.values()), len(self._members), most_elements)
        self._packs = [
            [[piece._replace(weight=numbers[piece.weight]) for piece in row] for row in pack] for pack in packs
        ]
        self._last_pack = {
            piece.weight: place for place, pack in enumerate(self._packs) for row in pack for piece in row
        }
        self._sums: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        self._num_sent = 0
        self._received: collections.deque[list[tf.Tensor]] = collections.deque(maxlen=NUM_STREAMS)

    def of(self, number: int) -> tf.Tensor:
        """Return the sum of a gradient on the owner of its weight, and the gradient itself elsewhere."""
        value, owner, runs = self._gradients[number]
        if owner is None:
            group, vector = self._pairs.group, self._vectors[number]
            rows = group.all_gather_equal_shapes(vector[None], self._pairs.place_here(self._rank))
            return tf.reshape(_sum(tf.unstack(rows, len(self._members)), runs), value.shape)
        while self._num_sent <= self._last_pack[number]:
            self._send(self._packs[self._num_sent])
            self._num_sent += 1
        if owner != self._rank:
            return value
        pieces = self._sums.pop(number)
        return tf.reshape(pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0), value.shape)

    def _send(self, pack: Sequence[Sequence[Piece]]) -> None:
        """Send to each other owner the pieces of its weights, and add those of this one's weights."""
        # Else copies of all gradients would be in memory, each from the moment when its gradient is there.
        first_sent = self._received[0] if len(self._received) == NUM_STREAMS else []
        received = {}
        for other in self._members:
            length = max(num_elements(pack[other]), num_elements(pack[self._rank]))
            if other != self._rank and length:
                with tf.control_dependencies(first_sent):
                    message = padded_row(self._vectors, pack[other], length, self._dtype)
                received[other] = self._pairs.exchange(message, self._rank, other)
        self._received.append(list(received.values()))
        place = 0
        for piece in pack[self._rank]:
            size = piece.stop - piece.start
            rows = [
                self._piece(piece) if one == self._rank else received[one][place : place + size]
                for one in self._members
            ]
            runs = between(self._gradients[piece.weight].runs, piece.start, piece.stop)
            self._sums[piece.weight].append(_sum(rows, runs))
            place += size

    def _piece(self, piece: Piece) -> tf.Tensor:
        return self._vectors[piece.weight][piece.start : piece.stop]


def _sum(rows: Sequence[tf.Tensor], runs: Sequence[Run]) -> tf.Tensor:
    """Return the sum of the rows of all replicas, each run in its order."""
    with tf_sums.in_order():
        if len(runs) == 1:
            return tf.add_n([rows[member] for member in runs[0].members])
        sums = [tf.add_n([rows[member][run.start : run.stop] for member in run.members]) for run in runs]
    return tf.concat(sums, 0)
