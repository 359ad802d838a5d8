"""Copies and sums between the devices of one process, as latency and bandwidth."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfpar.pipeline.partition.layer_profile import wait_for_gpus
from tfpar.pipeline.schedule.links import Link, fit_link
from tfpar.planning import spread
from tfpar.reduction.gradient_addition import sum_of

# Bytes of a message, and messages of a call: many small ones, or a call would take longer than they do.
_MESSAGES = {16 << 10: 64, 256 << 10: 32, 1 << 20: 8, 8 << 20: 8}
_RUNS = 9
_LEAST_SECONDS = 1e-6  # of a message: differences of two calls can be less than nothing


def measure_copy(devices: Sequence[str]) -> Link:
    """Measure copies from the first of two devices to the second and back.

    Args:
        devices: Two devices of one process.
    """

    def copies(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [_moved(one, devices) for one in tensors]

    return _fitted(copies, devices[:1], divide=2)[0]


def _moved(tensor: tf.Tensor, devices: Sequence[str]) -> tf.Tensor:
    with tf.device(devices[1]):
        there = tf.identity(tensor)
    with tf.device(devices[0]):
        return tf.identity(there)


def measure_reduction(devices: Sequence[str]) -> tuple[Link, float]:
    """Measure the sum of a gradient over devices on the first of them, and the copies of the sum to all.

    Args:
        devices: Devices of one process.

    Returns:
        The sums as a link, and the spread of their measurements.
    """

    def sums(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        results = []
        for index in range(0, len(gradients), len(devices)):
            with tf.device(devices[0]):
                total = sum_of(gradients[index : index + len(devices)])
            for device in devices:
                with tf.device(device):
                    results.append(tf.identity(total)[0])
        return results

    return _fitted(sums, devices)


def measure_exchange(devices: Sequence[str]) -> Link:
    """Measure sums over devices that wait for each other, as those of the activations of divided layers do.

    Args:
        devices: Devices of one process.
    """

    def sums(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        current = list(tensors[: len(devices)])
        for _ in range(len(tensors) // len(devices)):
            with tf.device(devices[0]):
                total = sum_of(current)
            for index, device in enumerate(devices):
                with tf.device(device):
                    current[index] = tf.nn.relu(total)  # an operation, or the sums would be merged into one
        return [one[0] for one in current]

    return _fitted(sums, devices)[0]


def measure_addition(device: str) -> Link:
    """Measure the sum of two tensors on a device, as a pipeline accumulates the gradients of micro-batches.

    Args:
        device: The device.
    """
    return measure_reduction([device, device])[0]


_Body = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def _fitted(body: _Body, devices: Sequence[str], divide: int = 1) -> tuple[Link, float]:
    """Return the link of messages, each with a tensor on every device, and the spread of the calls.

    Args:
        body: Sends the messages, and returns at most as many results as it has tensors.
        devices: The device of each tensor of a message.
        divide: Messages that follow each other for one tensor.
    """
    seconds, spreads = [], []
    for size, number in _MESSAGES.items():
        taken, num_results = _seconds(body, devices, size, number)
        of_call, _ = _seconds(functools.partial(_as_they_are, devices, num_results), devices, 4, number)
        each = statistics.median(taken) - statistics.median(of_call)
        seconds.append(max(each / number / divide, _LEAST_SECONDS))
        spreads.append(spread.of_repeats(taken))
    return fit_link(tuple(_MESSAGES), seconds), statistics.median(spreads)


def _as_they_are(devices: Sequence[str], number: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    results = []
    for index in range(number):
        with tf.device(devices[index % len(devices)]):
            results.append(tf.identity(tensors[index]))
    return results


def _seconds(body: _Body, devices: Sequence[str], num_bytes: int, count: int) -> tuple[list[float], int]:
    """Return the seconds of each of some calls, and the number of their results."""
    tensors = []
    for _ in range(count):
        for device in devices:
            with tf.device(device):
                tensors.append(tf.ones([num_bytes // 4]))
    run = tf.function(body, autograph=False)
    seconds = []
    for _ in range(_RUNS + 1):
        began_seconds = time.perf_counter()
        results = run(tensors)
        wait_for_gpus()
        seconds.append(time.perf_counter() - began_seconds)
        num_results = len(results)
        del results
    return seconds[1:], num_results
