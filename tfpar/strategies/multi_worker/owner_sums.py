"""Sums of gradients between replicas, each on the owner of its weight alone.

    replica 0 owns a    │ b c to 1 │ d to 2 │ ──┐    ┌──►  the gradients of a    of all replicas
    replica 1 owns b c  │ a to 0   │ d to 2 │ ──┼────┼──►  the gradients of b c  of all replicas
    replica 2 owns d    │ a to 0   │ b c to 1 │─┴────┴──►  the gradients of d    of all replicas

With equal shares that is half the bytes of an all-reduce. Each element is added in the order in which the all-reduce of
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
from tfpar.reduction.gradients import rounded
from tfpar.strategies.multi_worker.collectives import NUM_STREAMS, REDUCIBLE
from tfpar.strategies.multi_worker.owner_messages import Pack, blocks_of, length_of, packs_of_pair, send_less
from tfpar.strategies.multi_worker.pairs import Pairs
from tfpar.strategies.multi_worker.weight_exchange import Piece, padded_row

_SMALL_BYTES = 1 << 18  # Between many replicas, shorter messages would cost more than their bytes.


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
        if an all-reduce sends fewer bytes.

    Example:
        >>> from tfpar.strategies.multi_worker.collectives import Group
        >>> pairs = Pairs(Group(["CPU:0"], num_members=2), first=0)
        >>> list(sums_on_owners([tf.zeros([4]), None], [0, 1], [[0]], pairs, rank=0, pack_bytes=1 << 20))
        [0]
    """
    of_types: dict[tf.DType, dict[int, Gradient]] = collections.defaultdict(dict)
    for pack in packs:
        if all(map(_is_dense, (gradients[number] for number in pack))):
            for number, found in _of_pack(gradients, owners, pack, pairs, compression).items():
                of_types[found.value.dtype][number] = found
    functions: dict[int, Callable[[], tf.Tensor]] = {}
    for dtype, of_type in of_types.items():
        in_order = {number: of_type[number] for number in sorted(of_type, reverse=True)}  # as the backward pass ends
        row_bytes = min(pack_bytes, max(_SMALL_BYTES, pack_bytes // pairs.group.num_members))
        sums = _OwnerSums(in_order, pairs, rank, max(1, row_bytes // dtype.size))
        if sums.sends_less:
            for number in of_type:
                functions[number] = functools.partial(_as, sums.of, number, gradients[number].dtype)
    return functions


def _as(sum_of: Callable[[int], tf.Tensor], number: int, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(sum_of(number), dtype)


def _is_dense(gradient: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and bool(gradient.shape.num_elements())


def _of_pack(
    gradients: Sequence[Any], owners: Sequence[int | None], pack: Sequence[int], pairs: Pairs, compression: str | None
) -> dict[int, Gradient]:
    """Return the gradients of a pack with the order in which its all-reduce would add their elements."""
    sent = {number: rounded(gradients[number], compression) for number in pack}
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


class _OwnerSums:
    """The sums of the gradients of one dtype.

    Args:
        gradients: Gradients by number, in the order in which they are completed.
        pairs: As for `sums_on_owners`, as is `rank`.
        most_elements: The most elements of a message.
    """

    def __init__(self, gradients: Mapping[int, Gradient], pairs: Pairs, rank: int, most_elements: int) -> None:
        self._gradients, self._pairs, self._rank = gradients, pairs, rank
        self._members = range(pairs.group.num_members)
        self._vectors = {number: tf.reshape(gradient.value, [-1]) for number, gradient in gradients.items()}
        owned = {number: one.owner for number, one in gradients.items() if one.owner is not None}
        self._blocks = blocks_of({number: int(self._vectors[number].shape[0]) for number in owned}, most_elements)
        self._owners, self._most = [owned[block.weight] for block in self._blocks], most_elements

    @property
    def sends_less(self) -> bool:
        """Whether replicas send fewer bytes than in an all-reduce."""
        num_members = len(self._members)
        return send_less(self._blocks, self._owners, num_members, len(self._pairs.group.devices), self._most)

    @functools.cached_property
    def _links(self) -> dict[int, _Link]:
        found = {}
        for other in self._members:
            if other != self._rank:
                pair = min(self._rank, other), max(self._rank, other)
                packs = packs_of_pair(self._blocks, self._owners, pair, self._most)
                found[other] = _Link(packs, self._blocks, self._vectors, self._pairs, self._rank, other)
        return found

    def of(self, number: int) -> tf.Tensor:
        """Return the sum of a gradient on the owner of its weight, and the gradient itself elsewhere."""
        value, owner, runs = self._gradients[number]
        if owner is None:
            group, vector = self._pairs.group, self._vectors[number]
            rows = group.all_gather_equal_shapes(vector[None], self._pairs.place_here(self._rank))
            return tf.reshape(_sum(tf.unstack(rows, len(self._members)), runs), value.shape)
        blocks = [place for place, block in enumerate(self._blocks) if block.weight == number]
        if owner != self._rank:
            self._links[owner].exchange_until(blocks[-1])
            return value
        sums = [self._sum_of(place) for place in blocks]
        return tf.reshape(sums[0] if len(sums) == 1 else tf.concat(sums, 0), value.shape)

    def _sum_of(self, place: int) -> tf.Tensor:
        """Return the sum of a block, which this replica owns."""
        number, start, stop = self._blocks[place]
        own = self._vectors[number][start:stop]
        rows = [own if one == self._rank else self._links[one].received(place) for one in self._members]
        return _sum(rows, between(self._gradients[number].runs, start, stop))


class _Link:
    """The messages between this replica and another one; each is added to the graph when a sum first needs it.

    Args:
        packs: The pieces of blocks in each message, in the order of both replicas.
        blocks: All blocks.
        vectors: The elements of each gradient of this replica, by number.
        pairs: All replicas.
        rank: The number of this replica.
        other: The number of the other one.
    """

    def __init__(
        self,
        packs: Sequence[Pack],
        blocks: Sequence[Piece],
        vectors: Mapping[int, tf.Tensor],
        pairs: Pairs,
        rank: int,
        other: int,
    ) -> None:
        self._packs, self._blocks, self._vectors, self._pairs = packs, blocks, vectors, pairs
        self._rank, self._other, self._own_place = rank, other, int(rank > other)
        self._last_pack = {piece.weight: place for place, pack in enumerate(packs) for row in pack for piece in row}
        self._pieces: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
        self._num_sent = 0
        self._rows: collections.deque[tf.Tensor] = collections.deque(maxlen=NUM_STREAMS)

    def received(self, block: int) -> tf.Tensor:
        """Return a block of the other replica."""
        self.exchange_until(block)
        pieces = self._pieces.pop(block)
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)

    def exchange_until(self, block: int) -> None:
        """Exchange all messages up to the last one of a block."""
        while self._num_sent <= self._last_pack[block]:
            self._exchange(self._packs[self._num_sent])
            self._num_sent += 1

    def _exchange(self, pack: Pack) -> None:
        own, others = pack[self._own_place], pack[1 - self._own_place]
        pieces = [Piece(self._blocks[piece.weight].weight, *self._place_of(piece)) for piece in others]
        # Else copies of all gradients would be in memory, each from the moment when its gradient is there.
        with tf.control_dependencies([self._rows[0]] if len(self._rows) == NUM_STREAMS else []):
            message = padded_row(self._vectors, pieces, length_of(pack), next(iter(self._vectors.values())).dtype)
        row = self._pairs.exchange(message, self._rank, self._other)
        self._rows.append(row)
        start = 0
        for piece in own:
            size = piece.stop - piece.start
            self._pieces[piece.weight].append(row[start : start + size])
            start += size

    def _place_of(self, piece: Piece) -> tuple[int, int]:
        """Return the first element of a piece of a block in its gradient, and the element after the last."""
        first = self._blocks[piece.weight].start
        return first + piece.start, first + piece.stop


def _sum(rows: Sequence[tf.Tensor], runs: Sequence[Run]) -> tf.Tensor:
    """Return the sum of the rows of all replicas, each run in its order."""
    if len(runs) == 1:
        return _sum_in_order([rows[member] for member in runs[0].members])
    return tf.concat([_sum_in_order([rows[one][run.start : run.stop] for one in run.members]) for run in runs], 0)


def _sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    if tf.executing_eagerly():  # TensorFlow's sum of ten tensors or more has another order
        return functools.reduce(tf.add, terms)
    with tf_sums.in_order():
        return tf.add_n(terms)
