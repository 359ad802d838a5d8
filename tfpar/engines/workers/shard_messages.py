"""Updated weights, sent from their owners to all replicas by all-gathers of equally long rows.

replica 0 owns a, d   │ a a a d │ d     0 0 │      the rows of each all-gather, padded with zeros
replica 1 owns b, c   │ b b c c │ c c c c c │      when an owner has no more elements
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.engines.optimizer_shards import Copies
from tfpar.engines.workers.collectives import Group


class CollectiveCommunicator:
    """Messages between the copies of weights on the workers of a job.

    Args:
        first_copy: Number of the first copy of a weight in this process, among those of all.
        hosts: A device of each worker.
        group_of: Returns the group of the copies of a weight, by the device of the first copy in this process.
        pack_bytes: Most bytes of a message with updated weights.
    """

    def __init__(self, first_copy: int, hosts: Group, group_of: Callable[[str], Group], pack_bytes: int) -> None:
        self._first_copy, self._hosts, self._group_of, self._pack_bytes = first_copy, hosts, group_of, pack_bytes

    def send(self, weights: Sequence[Copies]) -> None:
        """Send each weight from its owner to all other replicas."""
        by_group: dict[Group, dict[tf.DType, list[Copies]]] = {}
        for weight in weights:
            first = weight.memories[0]
            by_dtype = by_group.setdefault(self._group_of(first.device), collections.defaultdict(list))
            by_dtype[first.dtype].append(weight)
        for group, by_dtype in by_group.items():
            for dtype, same_dtype in by_dtype.items():
                self._send(group, same_dtype, dtype)

    def _send(self, group: Group, weights: Sequence[Copies], dtype: tf.DType) -> None:
        most = max(1, self._pack_bytes // (group.num_members * dtype.size))
        replicas, first = range(len(weights[0].memories)), self._first_copy
        received = [_gather(weights, group, replica, first + replica, most) for replica in replicas]
        for replica, spans_by_weight in enumerate(received):
            for index, spans in spans_by_weight.items():
                memory, after = weights[index].memories[replica], weights[index].after[replica : replica + 1]
                with tf.device(memory.device), tf.control_dependencies(after):
                    memory.assign(tf.reshape(tf.concat(spans, 0), memory.shape))

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of a small tensor over all workers."""
        return self._hosts.all_reduce(tensor)


class _Span(NamedTuple):
    """A range of elements of a weight in a pack.

    Args:
        weight: Index of the weight.
        begin: First element of the range.
        end: Element after the last.
        place: Position of the first element in the row of the owner.
    """

    weight: int
    begin: int
    end: int
    place: int


def _packs(weights: Sequence[Copies], num_owners: int, most: int) -> Iterator[tuple[int, list[_Span]]]:
    """Yield the row length and the spans of each pack.

    Args:
        weights: Weights of one dtype.
        num_owners: Number of owners.
        most: Most elements per row.
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
    """Receive the weights of other owners on a local replica, as spans of elements by the index of the weight.

    Args:
        weights: Weights of one dtype.
        group: All replicas.
        replica: Index of the replica in this process.
        owner_here: Index of the replica in the group.
        most: Most elements per owner in a pack.
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
