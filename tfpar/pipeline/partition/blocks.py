"""The blocks of a model with sharded weights: consecutive layer calls whose weights are on a device together."""

from __future__ import annotations

from collections.abc import Sequence

MAX_BLOCKS = 16


def num_blocks(call_bytes: Sequence[int]) -> int:
    """Return the number of blocks: the fewest with at most the weights of the largest call, or 1/16 of the model's.

    A device holds the weights of two blocks at a time, and more blocks need more messages.

    Args:
        call_bytes: The bytes of the weights of each layer call.

    Example:
        >>> num_blocks([100, 0, 100, 0, 100]), num_blocks([10, 900, 10, 10, 10]), num_blocks([4] * 160)
        (3, 3, 16)
    """
    return len(blocks_within(call_bytes, max(max(call_bytes), -(-sum(call_bytes) // MAX_BLOCKS))))


def blocks_within(call_bytes: Sequence[int], limit_bytes: int) -> list[int]:
    """Return the number of layer calls of each block, where each takes as many as fit.

    Args:
        call_bytes: The bytes of the weights of each layer call, at least one.
        limit_bytes: The most bytes of a block of several calls.

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
