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
    limit_bytes = max(max(call_bytes), -(-sum(call_bytes) // MAX_BLOCKS))
    number, in_block = 1, 0
    for size in call_bytes:
        if in_block + size > limit_bytes:
            number, in_block = number + 1, 0
        in_block += size
    return number
