"""The memory of GPUs that training can use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpu_cards import cards_of_gpus

_MIB = 1 << 20
# The most that TensorFlow 2.21 itself leaves to CUDA's libraries of the memory of a GPU (MinSystemMemory in
# tensorflow/core/common_runtime/gpu/gpu_device.cc). They take it when they run first.
RESERVED_BYTES = 1800 * _MIB
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def free_bytes(devices: Sequence[str]) -> int | None:
    """Return the memory that training can use on each of some GPUs: that of the GPU with the least.

    It is the free memory of the card, less what CUDA's libraries will take, and with what this process has taken
    before and does not use. A logical GPU has the memory that was configured for it.

    Args:
        devices: Short names such as `"GPU:0"`; CPUs are ignored.

    Returns:
        Bytes; None without a GPU, and if the memory of a GPU is unknown, or this process took all of it at its start.

    Example:
        >>> free_bytes(["CPU:0"]) is None
        True
    """
    indices = [int(name[4:]) for name in devices if name.startswith("GPU:")]
    if not indices:
        return None
    limits, cards = _limits(), cards_of_gpus()
    with contextlib.suppress(ValueError):  # CUDA_VISIBLE_DEVICES is invalid
        visible = None if all(limits[index] for index in indices) else gpus.find(os.environ).gpus
        found = [limits[index] or _free_on_card(index, cards[index], visible or ()) for index in indices]
        return None if None in found else min(one for one in found if one is not None)
    return None


def _limits() -> list[int | None]:
    """Return the bytes that are configured for each logical GPU; None for one that may use its whole card."""
    import tensorflow as tf

    limits: list[int | None] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        configured = tf.config.get_logical_device_configuration(gpu) or [None]
        limits += [one.memory_limit and one.memory_limit * _MIB if one else None for one in configured]
    return limits


def _free_on_card(index: int, card: int, visible: Sequence[gpus.Gpu]) -> int | None:
    import tensorflow as tf

    if card >= len(visible):
        return None
    gpu = visible[card]
    grows = tf.config.experimental.get_memory_growth(tf.config.list_physical_devices("GPU")[card])
    takes_all = os.environ.get(_GROWTH, "false" if grows is False else "") == "false"
    if gpu.used_mib is None or gpu.total_mib is None or takes_all:
        return None
    taken = tf.config.experimental.get_memory_info(f"GPU:{index}")
    unused = max(0, taken["peak"] - taken["current"])
    return max(1, (gpu.total_mib - gpu.used_mib) * _MIB + int(unused) - RESERVED_BYTES)
