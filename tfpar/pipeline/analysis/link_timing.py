"""Measurement of transfers between the devices of neighbouring stages in different processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfpar.pipeline.analysis.step_timing import run_seconds

_ROUND_TRIPS = 4


def measure_transfers(devices: Sequence[str], cut_bytes: Sequence[int]) -> tuple[float, ...]:
    """Measure a transfer across each cut, in seconds; 0 between devices of the same process.

    Args:
        devices: The device of each stage.
        cut_bytes: Bytes of a micro-batch across each cut.

    Example:
        >>> measure_transfers(["CPU:0", "CPU:1"], [4096])
        (0.0,)
    """
    cuts = zip(devices, devices[1:], cut_bytes, strict=False)
    tasks = [tf.DeviceSpec.from_string(device).task for device in devices]
    crosses = [task != next_task for task, next_task in itertools.pairwise(tasks)]
    return tuple(_seconds(*cut) if crossing else 0.0 for cut, crossing in zip(cuts, crosses, strict=True))


def _seconds(device: str, other: str, num_bytes: int) -> float:
    """Return the minimum seconds of a transfer, measured in consecutive round trips."""

    def travel() -> tf.Tensor:
        tensor = sent
        for _ in range(_ROUND_TRIPS):
            with tf.device(other):
                tensor = tf.abs(tensor)
            with tf.device(device):
                tensor = tensor + 1.0
        return tensor[0]

    with tf.device(device):
        sent = tf.zeros([max(1, num_bytes // 4)])
    return min(run_seconds(travel)) / (2 * _ROUND_TRIPS)
