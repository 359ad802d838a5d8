"""Measurements of several devices in one process: their speed, the copies between them, their all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfpar
from tfpar import cluster
from tfpar.checks.child_program import at_stage
from tfpar.strategies.mirrored import chosen_all_reduce

HOST = "host"
_ROUNDS, _MORE_ROUNDS = 5, 3
_SIZES_BYTES = (4 << 10, 1 << 20, 32 << 20)


def measure(devices: Sequence[str], slow_factor: float) -> dict[str, Any]:
    """Measure several devices.

    Args:
        devices: Their short names.
        slow_factor: A device is measured again before it is called slower than the median by this factor.

    Returns:
        "seconds" of the same product on each device; "copies" between each ordered pair, with GPUs from and to the
        host too; and "all_reduce" for several sizes, None for one device.
    """
    return {
        "seconds": _speeds(devices, slow_factor),
        "copies": _copies([HOST, *devices] if devices[0].startswith("GPU") else devices),
        "all_reduce": _all_reduce(devices) if len(devices) > 1 else None,
    }


def _speeds(devices: Sequence[str], slow_factor: float) -> dict[str, float]:
    """Return the best time of each device: other programs make a device slower, never faster."""
    size = 4096 if devices[0].startswith("GPU") else 512
    products = {device: _product(device, size) for device in devices}
    best = dict.fromkeys(devices, float("inf"))
    for number in range(_ROUNDS * (1 + _MORE_ROUNDS)):
        if number >= _ROUNDS and max(best.values()) <= slow_factor * float(np.median(list(best.values()))):
            break
        for device in devices:  # in turn, so that a change of the machine's load meets all of them
            at_stage(f"the speed of {device}")
            best[device] = min(best[device], product_seconds(device, products[device]))
    return best


def _product(device: str, size: int) -> Callable[[], Any]:
    with tf.device(device):
        matrix = tf.random.stateless_uniform([size, size], [0, 0])

    def total() -> tf.Tensor:
        with tf.device(device):
            found = matrix
            for _ in range(4):
                found = tf.linalg.normalize(found @ matrix, axis=None)[0]
            return tf.reduce_sum(found)

    compiled: Callable[[], Any] = tf.function(total)
    compiled()  # traces and warms up
    return compiled


def product_seconds(device: str, total: Callable[[], Any]) -> float:
    """Return the seconds of some products on a device, to the result on the host."""
    begin = time.perf_counter()
    total().numpy()
    return time.perf_counter() - begin


def _copies(places: Sequence[str]) -> list[dict[str, Any]]:
    num_bytes = (64 if any(one.startswith("GPU") for one in places) else 4) << 20
    bits = np.random.default_rng(0).integers(0, 1 << 32, num_bytes // 4, dtype="uint32")
    found = []
    for source in places:
        for target in places:
            if source != target:
                at_stage(f"the copy from {source} to {target}")
                found.append(_copy(source, target, bits))
    return found


def _copy(source: str, target: str, bits: np.ndarray) -> dict[str, Any]:
    # As floats: TensorFlow keeps integers of 32 bits on the host. All bits arrive, also those of NaN.
    # Two tensors: TensorFlow keeps the copy of one, and copies it only once.
    with tf.device(_device(source)):
        other, there = (tf.identity(tf.constant(bits.view("float32"))) for _ in range(2))
    copied(other, source, target)  # the first copy sets up the connection
    begin = time.perf_counter()
    arrived = copied(there, source, target)
    seconds = time.perf_counter() - begin
    wrong = arrived.numpy().view("uint32") ^ bits
    return {
        "source": source,
        "target": target,
        "num_wrong": int(np.count_nonzero(wrong)),
        "num_words": int(wrong.size),
        "gb_per_second": bits.nbytes / seconds / 1e9,
    }


def copied(values: tf.Tensor, source: str, target: str) -> tf.Tensor:
    """Return a copy of a tensor on another device, once it has arrived."""
    with tf.device(_device(target)):
        arrived = tf.identity(values)
        if target.startswith("GPU"):
            arrived[-1].numpy()
    return arrived


def _device(place: str) -> str:
    return "CPU:0" if place == HOST else place


def _all_reduce(devices: Sequence[str]) -> dict[str, Any]:
    """Sum tensors of several sizes over all devices, with the all-reduce that `Mirrored` chooses."""
    at_stage("the set-up of the all-reduce")
    strategy = tfpar.Mirrored(list(devices))
    home: Any = strategy.home
    sizes = []
    for num_bytes in _SIZES_BYTES:
        at_stage(f"the all-reduce of {num_bytes >> 10} KiB")

        sizes.append(_summed(home, devices, num_bytes))
    return {"algorithm": chosen_all_reduce("auto", devices, cluster.card_numbers(devices)), "sizes": sizes}


def _summed(home: Any, devices: Sequence[str], num_bytes: int) -> dict[str, Any]:
    """Sum whole numbers, whose sum is exact, and return the best time and the devices with a wrong sum."""
    pattern = (np.arange(num_bytes // 4) % 7).astype("float32")
    own = home.experimental_distribute_values_from_function(
        lambda context: tf.constant(pattern + context.replica_id_in_sync_group + 1)
    )

    def sums(values: Any, size: int | None) -> Any:
        def on_replica(part: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("sum", part)[:size]

        return home.experimental_local_results(home.run(on_replica, args=(values,)))

    whole = tf.function(lambda values: sums(values, None))(own)
    number = len(devices)
    expected = number * pattern + number * (number + 1) / 2
    wrong = [name for name, one in zip(devices, whole, strict=True) if not np.array_equal(one.numpy(), expected)]
    first = tf.function(lambda values: sums(values, 1))  # without the copy to the host
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for one in first(own):
            one.numpy()
        best = min(best, time.perf_counter() - begin)
    return {"num_bytes": num_bytes, "seconds": best, "wrong": wrong}
