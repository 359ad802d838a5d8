"""The physical GPU (card) of each TensorFlow device; several logical devices or workers can share one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from tfpar.cluster.gpu import gpus, slurm_gpus


def cards_of_gpus() -> list[int]:
    """Return the index of the physical GPU of each logical GPU, without starting TensorFlow.

    Returns:
        Indices into TensorFlow's list of physical GPUs, in the order `GPU:0`, `GPU:1` and so on.
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
    """Hide the GPUs of the other Slurm tasks on this node; call it before TensorFlow starts.

    It does nothing if Slurm has bound GPUs to this task, or the user has chosen GPUs with `tf.config`.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    share = slurm_gpus.share(os.environ, len(visible))
    if share is not None and len(visible) == len(tf.config.list_physical_devices("GPU")):
        tf.config.set_visible_devices([visible[index] for index in share], "GPU")


def card_numbers(devices: Sequence[str]) -> list[int]:
    """Return a number for each device that identifies its physical GPU across all machines.

    Args:
        devices: Short names such as `"GPU:0"`.

    Returns:
        A 63-bit number per device, equal only for devices on the same card; 0 for a CPU.

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
