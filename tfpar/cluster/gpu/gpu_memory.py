"""The GPU memory available for training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpu_cards import cards_of_gpus

_MIB = 1 << 20
# The most that TensorFlow 2.21 reserves for CUDA libraries, which allocate it at their first call (MinSystemMemory in
# tensorflow/core/common_runtime/gpu/gpu_device.cc).
RESERVED_BYTES = 1800 * _MIB
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def free_bytes(devices: Sequence[str]) -> int | None:
    """Return the memory in bytes that training can use on each of `devices`: the minimum over the GPUs.

    It is the free memory of the card, plus memory that this process holds but does not use, minus the reserve of the
    CUDA libraries. A logical GPU has its configured memory limit.

    Args:
        devices: Short names such as `"GPU:0"`; CPUs are ignored.

    Returns:
        Bytes. None without GPUs, if the memory of a GPU is unknown, or if TensorFlow allocates all of it at startup.

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
        free = [limits[index] or _free_on_card(index, cards[index], visible or ()) for index in indices]
        return None if None in free else min(num_bytes for num_bytes in free if num_bytes is not None)
    return None


def _limits() -> list[int | None]:
    """Return the memory limit of each logical GPU in bytes; None without a limit."""
    import tensorflow as tf

    limits: list[int | None] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        configured = tf.config.get_logical_device_configuration(gpu) or [None]
        limits += [device.memory_limit and device.memory_limit * _MIB if device else None for device in configured]
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
    memory = tf.config.experimental.get_memory_info(f"GPU:{index}")
    unused = max(0, memory["peak"] - memory["current"])
    return max(1, (gpu.total_mib - gpu.used_mib) * _MIB + int(unused) - RESERVED_BYTES)
