"""The physical GPUs of TensorFlow's devices: logical devices and workers can share one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from tfpar.cluster.gpu import gpus, slurm_gpus


def cards_of_gpus() -> list[int]:
    """Return the number of the physical GPU of each logical one, without starting TensorFlow.

    Returns:
        In the order of `GPU:0`, `GPU:1` and so on: indices into TensorFlow's list of physical GPUs.
    """
    import tensorflow as tf

    physical = tf.config.list_physical_devices("GPU")
    # A GPU without a configuration has one logical device.
    return [
        physical.index(gpu)
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]


def take_share_of_slurm_task() -> None:
    """Make the GPUs of the other tasks of a Slurm job step on this node invisible; call it before TensorFlow starts.

    GPUs that Slurm has bound to this task, and a choice that the user has made with `tf.config`, stay.
    """
    import tensorflow as tf

    found = tf.config.get_visible_devices("GPU")
    share = slurm_gpus.share(os.environ, len(found))
    if share is not None and len(found) == len(tf.config.list_physical_devices("GPU")):
        tf.config.set_visible_devices([found[index] for index in share], "GPU")


def card_numbers(devices: Sequence[str]) -> list[int]:
    """Return a number for each device that only devices on the same physical GPU share, on any machine.

    Args:
        devices: Short names such as `"GPU:0"`.

    Returns:
        One number of 63 bits for each device; 0 for a CPU.

    Example:
        >>> card_numbers(["CPU:0"])
        [0]
    """
    if not any(name.startswith("GPU") for name in devices):
        return [0] * len(devices)
    cards, identities = cards_of_gpus(), gpus.identities(os.environ)
    return [_number(cards[int(name[4:])], identities) if name.startswith("GPU") else 0 for name in devices]


def _number(card: int, identities: Sequence[str]) -> int:
    identity = identities[card] if card < len(identities) else f"{os.uname().nodename}/{card}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8]) >> 1 | 1
