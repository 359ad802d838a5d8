"""The GPUs for tests with the mark gpu: those of this machine, or logical CPUs in their place (--gpu-stand-ins).

several GPUs   GPU:0 GPU:1 …                    one GPU   GPU:0 GPU:1 GPU:2 GPU:3, logical devices of it
"""

from __future__ import annotations

import contextlib
import os

import pytest
import tensorflow as tf

import tfpar
from tfpar.cluster.gpu import gpus

NUM_LOGICAL = 4
# Of each logical device, in MiB: the models are small, and several test processes share a GPU.
MOST_MIB, LEAST_MIB, SHARES = 1024, 256, 24
AGAIN = "TensorFlow has started on one logical GPU; python -m pytest -m gpu starts it on several"


def devices(*, stand_ins: bool) -> list[str]:
    """Return the names of at least two devices; skip the test on a machine without a GPU.

    Args:
        stand_ins: Whether logical CPUs take the place of GPUs; `CPU:0` stays the host.
    """
    if stand_ins:
        tfpar.use_logical_cpus(1 + NUM_LOGICAL)
        return [f"CPU:{index}" for index in range(1, 1 + NUM_LOGICAL)]
    physical = tf.config.list_physical_devices("GPU")
    if not physical:
        pytest.skip("there is no GPU")
    if len(physical) == 1:
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=_part_mib())] * NUM_LOGICAL
        with contextlib.suppress(RuntimeError):
            tf.config.set_logical_device_configuration(physical[0], parts)
    names = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices("GPU")]
    if len(names) < 2:
        pytest.skip(AGAIN)
    return names


def num_cards() -> int:
    """Return the number of physical GPUs."""
    return len(tf.config.list_physical_devices("GPU"))


def _part_mib() -> int:
    found = gpus.find(os.environ).gpus
    if not found or found[0].used_mib is None or found[0].total_mib is None:
        return LEAST_MIB
    return max(LEAST_MIB, min(MOST_MIB, (found[0].total_mib - found[0].used_mib) // SHARES))
