"""New weights from their owners to all replicas: all-gathers in packs, in which every owner sends as much.

replica 0 owns a, d   │ a a a d │ d     0 0 │      the rows of each all-gather, with zeros
replica 1 owns b, c   │ b b c c │ c c c c c │      where an owner has no more
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.engines.optimizer_shards import Copies
from tfpar.engines.workers.collectives import Group


class CollectiveCommunicator:
    """The messages between the copies of weights in the workers of a job.

    Args:
        rank: The rank of this worker.
        hosts: One device of each worker.
        group_of: Returns the group of the copies of a weight by the device of the first one here. In each process they
            are on as many devices.
        pack_bytes: The most bytes of a message with new weights.
    """

    def __init__(self, rank: int, hosts: Group, group_of: Callable[[str], Group], pack_bytes: int) -> None:
        self._rank, self._hosts, self._group_of, self._pack_bytes = rank, hosts, group_of, pack_bytes

    def send(self, weights: Sequence[Copies]) -> None:
        """Send each weight from its owner to all other replicas."""
        of_groups: dict[Group, dict[tf.DType, list[Copies]]] = {}
        for weight in weights:
            first = weight.memories[0]
            of_types = of_groups.setdefault(self._group_of(first.device), collections.defaultdict(list))
            of_types[first.dtype].append(weight)
        for group, of_types in of_groups.items():
            for dtype, of_type in of_types.items():
                self._send(group, of_type, dtype)

    def _send(self, group: Group, weights: Sequence[Copies], dtype: tf.DType) -> None:
        most = max(1, self._pack_bytes // (group.num_members * dtype.size))
        num_replicas = len(weights[0].memories)
        first_replica = self._rank * num_replicas
        received = [_gather(weights, group, replica, first_replica + replica, most) for replica in range(num_replicas)]
        for replica, pieces in enumerate(received):
            for number, of_weight in pieces.items():
                memory, after = weights[number].memories[replica], weights[number].after[replica : replica + 1]
                with tf.device(memory.device), tf.control_dependencies(after):
                    memory.assign(tf.reshape(tf.concat(of_weight, 0), memory.shape))

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of a small tensor over all workers."""
        return self._hosts.all_reduce(tensor)


class _Span(NamedTuple):
    """The elements of a weight in a pack.

    Args:
        weight: The number of the weight.
        begin: The first element of the weight.
        end: The element after the last.
        place: The place of the first element in the row of the owner.
    """

    weight: int
    begin: int
    end: int
    place: int


def _packs(weights: Sequence[Copies], num_owners: int, most: int) -> Iterator[tuple[int, list[_Span]]]:
    """Yield the length of the rows of each pack, and its spans.

    Args:
        weights: Weights of one type.
        num_owners: The number of owners.
        most: The most elements of a row.
    """
    starts, totals = [], [0] * num_owners
    sizes = [int(weight.memories[0].shape.num_elements()) for weight in weights]
    for size, weight in zip(sizes, weights, strict=True):
        starts.append(totals[weight.owner])
        totals[weight.owner] += size
    for first in range(0, max(totals), most):
        length = min(most, max(totals) - first)
        spans = [
            _Span(number, max(0, first - start), min(size, first + length - start), max(0, start - first))
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        yield length, [span for span in spans if span.begin < span.end]


def _gather(
    weights: Sequence[Copies], group: Group, replica: int, owner_here: int, most: int
) -> Mapping[int, list[tf.Tensor]]:
    """Return the elements of the weights of other owners on a local replica, in pieces, by the number of the weight.

    Args:
        weights: Weights of one type.
        group: All replicas.
        replica: The number of the replica in this process.
        owner_here: Its number in the group.
        most: The most elements of an owner in a pack.
    """
    received: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
    with tf.device(weights[0].memories[replica].device):
        own = {number: weight for number, weight in enumerate(weights) if weight.owner == owner_here}
        values = {number: tf.reshape(weight.memories[replica].read_value(), [-1]) for number, weight in own.items()}
        for length, spans in _packs(weights, group.num_members, most):
            row = [values[span.weight][span.begin : span.end] for span in spans if span.weight in own]
            filled = sum(span.end - span.begin for span in spans if span.weight in own)
            if filled < length:
                row.append(tf.zeros([length - filled], weights[0].memories[replica].dtype))
            rows = group.all_gather_equal_shapes(tf.concat(row, 0), replica)
            for span in spans:
                if span.weight not in own:
                    first = weights[span.weight].owner * length + span.place
                    received[span.weight].append(rows[first : first + span.end - span.begin])
    return received
