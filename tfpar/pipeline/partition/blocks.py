"""Blocks of a model with sharded weights: consecutive layer calls whose weights are gathered together."""

from __future__ import annotations

from collections.abc import Sequence

MAX_BLOCKS = 16


def num_blocks(call_bytes: Sequence[int]) -> int:
    """Return the number of blocks that bounds memory with the fewest messages.

    A device holds the weights of two blocks at a time. A block is limited to the largest layer call, or to 1/16 of the
    model if that is more.

    Args:
        call_bytes: Bytes of the weights of each layer call.

    Example:
        >>> num_blocks([100, 0, 100, 0, 100]), num_blocks([10, 900, 10, 10, 10]), num_blocks([4] * 160)
        (3, 3, 16)
    """
    return len(blocks_within(call_bytes, max(max(call_bytes), -(-sum(call_bytes) // MAX_BLOCKS))))


def blocks_within(call_bytes: Sequence[int], limit_bytes: int) -> list[int]:
    """Return the number of layer calls of each block, filling the blocks greedily.

    Args:
        call_bytes: Bytes of the weights of each layer call; at least one entry.
        limit_bytes: Maximum bytes of a block with several calls.

    Example:
        >>> blocks_within([100, 0, 100, 300, 50], 200)
        [3, 1, 1]
    """
    numbers, in_block = [0], 0
    for size in call_bytes:
        if numbers[-1] and in_block + size > limit_bytes:
            numbers.append(0)
            in_block = 0
        numbers[-1] += 1
        in_block += size
    return numbers
