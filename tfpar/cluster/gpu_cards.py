"""The physical GPUs of TensorFlow's devices: logical devices and workers can share one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from tfpar.cluster import gpus


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
