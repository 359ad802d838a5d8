"""Device tests, run in subprocesses: each device alone against NumPy, and several together.

Operands are small integers, so that results are exact in float32 and even in TensorFloat-32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfpar
from tfpar import cluster
from tfpar.checks.processes import at_stage
from tfpar.messages.reasons import message_of
from tfpar.strategies.mirrored import chosen_all_reduce

HOST = "host"
_SIZE, _CHANNELS, _IMAGE = 256, 8, 24
_ALLOWED = 0.25  # cuDNN algorithms may round intermediate fractions; exact results are integers
_ROUNDS, _MOST_ROUNDS = 5, 20
_SIZES_BYTES = (4 << 10, 1 << 20, 32 << 20)


def see() -> dict[str, Any]:
    """Return the devices of TensorFlow and its build info. It starts every GPU."""
    build, visible = tf.sysconfig.get_build_info(), tf.config.list_physical_devices("GPU")
    return {
        "num_cpus": len(tf.config.list_logical_devices("CPU")),
        "gpus": [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in visible],
        "built_with_cuda": bool(tf.test.is_built_with_cuda()),
        "cuda": str(build.get("cuda_version", "")),
        "cudnn": str(build.get("cudnn_version", "")),
        "started": [device.name for device in tf.config.list_logical_devices("GPU")],
    }


def examine(device: str) -> dict[str, Any]:
    """Run a matrix product, a convolution and an XLA-compiled function on one device.

    Args:
        device: The short name of the device.

    Returns:
        For each operation, the largest error, the number of wrong values and the seconds of the first call, or the
        error message.
    """
    results: dict[str, Any] = {}
    for name, operation in {"product": product, "convolution": convolution, "XLA": compiled}.items():
        at_stage(name)
        begin = time.perf_counter()
        try:
            with tf.device(device):
                actual, expected = operation(device)
        except Exception as error:
            results[name] = {"problem": f"{type(error).__name__}: {' '.join(message_of(error).split())[:300]}"}
            continue
        errors = np.abs(actual.astype("float64") - expected)
        results[name] = {
            "num_wrong": int((~(errors <= _ALLOWED * (name == "convolution"))).sum()),  # NaN is wrong
            "num_values": errors.size,
            "largest_error": float(np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max()),
            "seconds": time.perf_counter() - begin,
        }
    return results


def product(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix product and its expected value."""
    left, right = _whole(_SIZE, _SIZE), _whole(_SIZE, _SIZE)
    return (tf.constant(left) @ tf.constant(right)).numpy(), left.astype("float64") @ right


def convolution(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a 3x3 convolution and its expected value."""
    images, filters = _whole(4, _IMAGE, _IMAGE, _CHANNELS), _whole(3, 3, _CHANNELS, _CHANNELS)
    windows = np.lib.stride_tricks.sliding_window_view(images.astype("float64"), (3, 3), axis=(1, 2))
    actual = tf.nn.conv2d(tf.constant(images), tf.constant(filters), 1, "VALID").numpy()
    return actual, np.einsum("bijchw,hwcd->bijd", windows, filters)


def compiled(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of an XLA-compiled function and its expected value."""
    values = _whole(_SIZE, _SIZE)
    function = tf.function(lambda x: tf.reduce_sum(tf.maximum(x * 3.0 + 1.0, 0.0), axis=1), jit_compile=True)
    return function(tf.constant(values)).numpy(), np.maximum(values * 3.0 + 1.0, 0.0).sum(1)


def _whole(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype("float32")


def measure(devices: Sequence[str], slow_factor: float) -> dict[str, Any]:
    """Measure several devices together.

    Returns:
        "seconds" of the same product on each device; "copies" between each ordered pair of devices, and between GPUs
        and the host; "all_reduce" by size, None for one device.
    """
    places = [HOST, *devices] if devices[0].startswith("GPU") else devices
    return {
        "seconds": _speeds(devices, slow_factor),
        "copies": [_copy(source, target) for source in places for target in places if source != target],
        "all_reduce": _all_reduce(devices) if len(devices) > 1 else None,
    }


def _speeds(devices: Sequence[str], slow_factor: float) -> dict[str, float]:
    """Return the best time of each device: other programs can only slow a device down."""
    products = {device: _chain_of_products(device) for device in devices}
    best = dict.fromkeys(devices, float("inf"))
    for number in range(_MOST_ROUNDS):
        if number >= _ROUNDS and max(best.values()) <= slow_factor * float(np.median(list(best.values()))):
            break
        for device in devices:  # interleaved, so that changes in the machine's load affect all of them
            at_stage(f"the speed of {device}")
            best[device] = min(best[device], product_seconds(device, products[device]))
    return best


def _chain_of_products(device: str) -> Callable[[], Any]:
    size = 4096 if device.startswith("GPU") else 512
    with tf.device(device):
        matrix = tf.random.stateless_uniform([size, size], [0, 0])

    def total() -> tf.Tensor:
        with tf.device(device):
            result = matrix
            for _ in range(4):
                result = tf.linalg.normalize(result @ matrix, axis=None)[0]
            return tf.reduce_sum(result)

    function: Callable[[], Any] = tf.function(total)
    function()  # trace and warm up
    return function


def product_seconds(device: str, total: Callable[[], Any]) -> float:
    """Return the seconds of a chain of products on a device, until the result is on the host."""
    begin = time.perf_counter()
    total().numpy()
    return time.perf_counter() - begin


def _copy(source: str, target: str) -> dict[str, Any]:
    at_stage(f"the copy from {source} to {target}")
    num_bytes = (64 if "GPU" in source + target else 4) << 20
    bits = np.random.default_rng(0).integers(0, 1 << 32, num_bytes // 4, dtype="uint32")
    # As floats, because TensorFlow keeps int32 tensors on the host. Copies preserve all bits, even those of NaN.
    # Two tensors, because TensorFlow caches the copy of a tensor.
    with tf.device(_device(source)):
        warmup, values = (tf.identity(tf.constant(bits.view("float32"))) for _ in range(2))
    copied(warmup, source, target)  # the first copy sets up the connection
    begin = time.perf_counter()
    arrived = copied(values, source, target)
    seconds = time.perf_counter() - begin
    num_wrong = int(np.count_nonzero(arrived.numpy().view("uint32") ^ bits))
    figures = {"num_wrong": num_wrong, "num_words": bits.size, "gb_per_second": bits.nbytes / seconds / 1e9}
    return {"source": source, "target": target, **figures}


def copied(values: tf.Tensor, source: str, target: str) -> tf.Tensor:
    """Copy a tensor to another device, and wait until it has arrived."""
    with tf.device(_device(target)):
        arrived = tf.identity(values)
        if target.startswith("GPU"):
            arrived[-1].numpy()
    return arrived


def _device(place: str) -> str:
    return "CPU:0" if place == HOST else place


def _all_reduce(devices: Sequence[str]) -> dict[str, Any]:
    """Measure the all-reduce that `Mirrored` chooses, for several sizes."""
    at_stage("the set-up of the all-reduce")
    home: Any = tfpar.Mirrored(list(devices)).engine.home
    algorithm = chosen_all_reduce("auto", devices, cluster.card_numbers(devices))
    return {"algorithm": algorithm, "sizes": [_summed(home, devices, num_bytes) for num_bytes in _SIZES_BYTES]}


def _summed(home: Any, devices: Sequence[str], num_bytes: int) -> dict[str, Any]:
    """All-reduce integers, whose sum is exact; return the best time and the devices with wrong sums."""
    at_stage(f"the all-reduce of {num_bytes >> 10} KiB")
    pattern, number = (np.arange(num_bytes // 4) % 7).astype("float32"), len(devices)
    own = home.experimental_distribute_values_from_function(
        lambda context: tf.constant(pattern + context.replica_id_in_sync_group + 1)
    )

    def sums(values: Any, size: int | None) -> Any:
        def on_replica(local: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("sum", local)[:size]

        return home.experimental_local_results(home.run(on_replica, args=(values,)))

    whole = tf.function(lambda values: sums(values, None))(own)
    expected = number * pattern + number * (number + 1) / 2
    wrong = [name for name, total in zip(devices, whole, strict=True) if not np.array_equal(total, expected)]
    first = tf.function(lambda values: sums(values, 1))  # without the copy to the host
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for total in first(own):
            total.numpy()
        best = min(best, time.perf_counter() - begin)
    return {"num_bytes": num_bytes, "seconds": best, "wrong": wrong}
