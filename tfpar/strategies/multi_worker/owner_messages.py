"""Messages of gradients from each replica to the owners of their weights.

backward pass        │ c (owner 1) │ b (owner 0) │ a (owner 1) │
replica 0 ──► 1                    │ c           │ a           │      of the same length in both directions: c waits for
replica 1 ──► 0                    │ b           │ 0           │      b, and where one has no more, zeros are sent
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tfpar.strategies.multi_worker.weight_exchange import Piece, num_elements

# The part of the gradients of two owners that may wait for gradients of the other one, to share a message with them.
_WAITING_PART = 1 / 8
Pack = tuple[list[Piece], list[Piece]]


def blocks_of(sizes: Mapping[int, int], most_elements: int) -> list[Piece]:
    """Return the parts of gradients that are summed at a time.

    Args:
        sizes: The number of elements of each gradient, by its number.
        most_elements: The most elements of a part.

    Example:
        >>> blocks_of({7: 3}, most_elements=2)
        [Piece(weight=7, start=0, stop=2), Piece(weight=7, start=2, stop=3)]
    """
    return [
        Piece(number, start, min(start + most_elements, size))
        for number, size in sizes.items()
        for start in range(0, size, most_elements)
    ]


def packs_of_pair(blocks: Sequence[Piece], owners: Sequence[int], pair: tuple[int, int], most: int) -> list[Pack]:
    """Return the pieces in each message of two replicas: those for the first one, and those for the second one.

    A message has full rows in both directions. Where one of them has much more to receive for now, its row is sent
    alone: no more than an eighth of the gradients of both waits for gradients of layers that come later.

    Args:
        blocks: The blocks of all gradients, in the order in which they are completed.
        owners: The owner of each block.
        pair: The two replicas.
        most: The most elements of a row.

    Returns:
        Pieces of blocks: their weight is the number of the block.

    Example:
        >>> packs_of_pair([Piece(0, 0, 2), Piece(1, 0, 2)], [0, 1], (0, 1), most=2)
        [([Piece(weight=0, start=0, stop=2)], [Piece(weight=1, start=0, stop=2)])]
    """
    chosen = [number for number, owner in enumerate(owners) if owner in pair]
    packs: list[Pack] = []
    waiting: Pack = ([], [])
    most_waiting = max(most, int(num_elements([blocks[number] for number in chosen]) * _WAITING_PART))
    for number in chosen:
        block = blocks[number]
        waiting[pair.index(owners[number])].append(Piece(number, 0, block.stop - block.start))
        while min(map(num_elements, waiting)) >= most or max(map(num_elements, waiting)) > most_waiting:
            packs.append((_taken(waiting[0], most), _taken(waiting[1], most)))
    while any(waiting):
        packs.append((_taken(waiting[0], most), _taken(waiting[1], most)))
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


def length_of(pack: Pack) -> int:
    """Return the number of elements that a message has in each direction.

    Args:
        pack: Its pieces.

    Example:
        >>> length_of(([Piece(0, 0, 2)], []))
        2
    """
    return max(map(num_elements, pack))


def send_less(blocks: Sequence[Piece], owners: Sequence[int], num_members: int, num_here: int, most: int) -> bool:
    """Return whether the busiest process sends fewer elements to others than in an all-reduce.

    It sends more where a weight is much larger than the share of its owner, and where its members are many: in a ring,
    they send to other processes once, each in its turn.

    Args:
        blocks: As for `packs_of_pair`.
        owners: As for `packs_of_pair`.
        num_members: The number of replicas.
        num_here: The number of replicas of each process.
        most: As for `packs_of_pair`.

    Example:
        >>> even, one = [Piece(number, 0, 8) for number in range(4)], [Piece(0, 0, 8)]
        >>> send_less(even, [0, 1, 2, 3], 4, 1, most=8), send_less(one, [0], 4, 1, most=8)
        (True, False)
    """
    sent = [0] * (num_members // num_here)
    for pair in itertools.combinations(range(num_members), 2):
        first, second = (member // num_here for member in pair)
        if first != second:
            elements = sum(map(length_of, packs_of_pair(blocks, owners, pair, most)))
            sent[first] += elements
            sent[second] += elements
    return max(sent) * num_members <= 2 * (num_members - 1) * num_elements(blocks)
