"""New weights from their owners to all replicas: all-gathers in packs, in which every owner sends as much.

replica 0 owns a, d   │ a a a d │ d     0 0 │      the rows of each all-gather, with zeros
replica 1 owns b, c   │ b b c c │ c c c c c │      where an owner has no more
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import Group


class Piece(NamedTuple):
    """Consecutive elements of a weight.

    Args:
        weight: The number of the weight.
        start: The first element.
        stop: The element after the last.
    """

    weight: int
    start: int
    stop: int


def num_elements(row: Sequence[Piece]) -> int:
    """Return the number of elements of a row.

    Args:
        row: Its pieces.

    Example:
        >>> num_elements([Piece(0, 2, 5), Piece(1, 0, 1)])
        4
    """
    return sum(piece.stop - piece.start for piece in row)


def padded_row(vectors: Mapping[int, tf.Tensor], row: Sequence[Piece], length: int, dtype: tf.DType) -> tf.Tensor:
    """Return the elements of a row, padded with zeros.

    Args:
        vectors: The elements of each weight of the row, `[elements]`.
        row: Its pieces.
        length: The number of elements with the padding.
        dtype: The dtype of all.

    Example:
        >>> padded_row({0: tf.constant([1, 2, 3])}, [Piece(0, 1, 3)], 3, tf.int32)
        <tf.Tensor: shape=(3,), dtype=int32, numpy=array([2, 3, 0], dtype=int32)>
    """
    parts = [vectors[piece.weight][piece.start : piece.stop] for piece in row]
    missing = length - num_elements(row)
    if missing:
        parts.append(tf.zeros([missing], dtype))
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def packs_of(sizes: Sequence[int], owners: Sequence[int], num_owners: int, most: int) -> list[list[list[Piece]]]:
    """Return the pieces of each owner in each pack.

    Args:
        sizes: The number of elements of each weight.
        owners: The owner of each weight.
        num_owners: The number of owners.
        most: The most elements of an owner in a pack.

    Example:
        >>> packs_of([3, 2], [0, 1], num_owners=2, most=2)[1]
        [[Piece(weight=0, start=2, stop=3)], []]
    """
    packs: list[list[list[Piece]]] = []
    sent = [0] * num_owners
    for weight, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        start = 0
        while start < size:
            pack, used = divmod(sent[owner], most)
            stop = min(size, start + most - used)
            if pack == len(packs):
                packs.append([[] for _ in range(num_owners)])
            packs[pack][owner].append(Piece(weight, start, stop))
            sent[owner] += stop - start
            start = stop
    return packs


def exchange(
    weights: Sequence[Sequence[tf.Variable]],
    owners: Sequence[int],
    group: Group,
    first_replica: int,
    before: Sequence[Sequence[tf.Tensor]],
    pack_bytes: int,
) -> None:
    """Send each weight from its owner to all other replicas.

    Args:
        weights: The memory of each weight on each local replica.
        owners: The owner of each weight, its number among the replicas of all workers.
        group: All replicas.
        first_replica: The number of the first local replica.
        before: For each weight a tensor of each local replica, which its assignment waits for; none for no wait.
        pack_bytes: The most bytes of a pack.
    """
    of_types: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for number, memories in enumerate(weights):
        of_types[memories[0].dtype].append(number)
    for dtype, numbers in of_types.items():
        most = max(1, pack_bytes // (group.num_members * dtype.size))
        sizes = [weights[number][0].shape.num_elements() for number in numbers]
        packs = packs_of(sizes, [owners[number] for number in numbers], group.num_members, most)
        memories_of_type = [weights[number] for number in numbers]
        received = [_gathered(packs, memories_of_type, group, first_replica + replica, replica, dtype)
                    for replica in range(len(weights[0]))]  # fmt: skip
        for replica, pieces in enumerate(received):
            for number, of_weight in pieces.items():
                memory, waits = memories_of_type[number][replica], before[numbers[number]]
                with tf.device(memory.device), tf.control_dependencies([waits[replica]] if waits else []):
                    memory.assign(tf.reshape(tf.concat(of_weight, 0), memory.shape))


def _gathered(
    packs: Sequence[Sequence[Sequence[Piece]]],
    weights: Sequence[Sequence[tf.Variable]],
    group: Group,
    own: int,
    replica: int,
    dtype: tf.DType,
) -> Mapping[int, list[tf.Tensor]]:
    """Return the pieces of weights of other owners on a local replica, by weight."""
    found: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
    with tf.device(weights[0][replica].device):
        values = {
            piece.weight: tf.reshape(weights[piece.weight][replica].read_value(), [-1])
            for pack in packs
            for piece in pack[own]
        }
        for pack in packs:
            length = max(map(num_elements, pack))
            rows = group.all_gather_equal_shapes(padded_row(values, pack[own], length, dtype), replica)
            for owner, pieces in enumerate(pack):
                start = owner * length
                for piece in pieces:
                    stop = start + piece.stop - piece.start
                    if owner != own:
                        found[piece.weight].append(rows[start:stop])
                    start = stop
    return found
