"""The order in which TensorFlow's ring adds the tensors of its members.

    chunk 0   member 0 ──► member 1 ──► member 2      each member adds its own chunk to the sum that it receives
    chunk 1   member 1 ──► member 2 ──► member 0
    chunk 2   member 2 ──► member 0 ──► member 1

The sum of three numbers or more depends on their order. TensorFlow 2.21 chooses the chunks in
`GenerateSubdivsInCollectiveParams` of tensorflow/core/common_runtime/ring_alg.cc, aligns them in
`CollectiveAdapter::AlignedChunkElts` of base_collective_executor.cc, and does not say which ones they are.
"""

from __future__ import annotations

from typing import NamedTuple

_LARGEST_CHUNK_BYTES = 4 << 20
_DEFAULT_SUBDIVISIONS = 2
_ALIGNMENT_BYTES = 64


class Run(NamedTuple):
    """Consecutive elements of a message, which are added in one order.

    Args:
        start: The first element.
        stop: The element after the last.
        members: The members in the order in which their elements are added.
    """

    start: int
    stop: int
    members: tuple[int, ...]


def order_of_sums(
    num_elements: int, element_bytes: int, num_members: int, members_per_worker: int, subdivisions: int = 0
) -> list[Run]:
    """Return the runs of a message that members of several workers all-reduce.

    Args:
        num_elements: The number of elements of the message.
        element_bytes: The bytes of an element.
        num_members: The number of members of all workers.
        members_per_worker: The number of members of each worker.
        subdivisions: `max_subdivs_per_device` of the operation; 0 for TensorFlow's own number.

    Example:
        >>> [run.members for run in order_of_sums(48, element_bytes=4, num_members=3, members_per_worker=1)]
        [(0, 1, 2), (1, 2, 0)]
    """
    message_bytes = num_elements * element_bytes
    most = (subdivisions or _DEFAULT_SUBDIVISIONS) * members_per_worker
    num_rings = 1
    while message_bytes // (num_members * num_rings) > _LARGEST_CHUNK_BYTES and num_rings < most:
        num_rings += 1
    rings = [_ring(number, num_rings, num_members, members_per_worker) for number in range(num_rings)]
    length = _aligned(-(-num_elements // (num_members * num_rings)), element_bytes)
    runs = []
    for chunk, start in enumerate(range(0, num_elements, length)):
        first, ring = divmod(chunk, num_rings)
        members = (*rings[ring][first:], *rings[ring][:first])
        runs.append(Run(start, min(start + length, num_elements), members))
    return runs


def _ring(number: int, num_rings: int, num_members: int, members_per_worker: int) -> list[int]:
    """Return the members of a ring in its order: those of each worker rotated, and backward in every second ring."""
    offset = max(1, members_per_worker // num_rings) * number
    local = [(place + offset) % members_per_worker for place in range(members_per_worker)]
    if number % 2:
        local = [members_per_worker - 1 - place for place in local]
    return [first + place for first in range(0, num_members, members_per_worker) for place in local]


def _aligned(num_elements: int, element_bytes: int) -> int:
    """Return the length of chunks: whole lines of memory, and one more where the elements would fill them."""
    return (num_elements * element_bytes // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES // element_bytes
