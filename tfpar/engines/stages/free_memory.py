"""A partition within the free memory of GPUs, which other processes share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from tfpar.messages import user_warnings
from tfpar.messages.number_format import figure
from tfpar.pipeline.partition.partitioner import MemoryNeeds, Partition


def within_free_memory(
    name: str, cut: Callable[[MemoryNeeds], Partition], memory: MemoryNeeds, free_bytes: int, num_devices: int | None
) -> Partition:
    """Return a partition within the free memory of the GPUs if there is one, or else warn: needs are estimates.

    Args:
        name: The name of the model.
        cut: Returns the partition of the model for some needs.
        memory: The needs, without a limit.
        free_bytes: The free memory of the GPU that has the least.
        num_devices: The number of devices, for a warning; None for no warning.
    """
    with contextlib.suppress(ValueError):
        return cut(dataclasses.replace(memory, limit_bytes=free_bytes))
    partition = cut(memory)
    if num_devices is not None:
        needed = partition.device_bytes(memory, num_devices)
        user_warnings.warn(
            f"The stages of {name!r} need up to {figure(max(needed) / 1e6)} MB on one device, by estimate, and the GPU "
            f"with the least free memory has {figure(free_bytes / 1e6)} MB: training may run out of memory. Use "
            "balance='memory', more stages, smaller micro-batches or recompute=True, or end other processes on the "
            "GPUs."
        )
    return partition
