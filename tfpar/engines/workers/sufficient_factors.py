"""Sufficient factors of the gradient of a Dense kernel, gathered where that is faster than an all-reduce.

    kernel [2048, 2048] of a Dense layer, 16 examples on each of two workers:

    gradient   = inputs' x deltas    [2048, 16] x [16, 2048] → [2048, 2048]      all-reduce: 16.8 MB a worker
    factors    = inputs, deltas      [16, 2048] and [16, 2048]                   all-gather:  0.3 MB a worker

The gradient of the global batch is the product of all rows of both factors, so an all-gather and one matmul give the
exact sum. (Xie et al. 2014, "Distributed Machine Learning via Sufficient Factor Broadcasting",
arXiv 1409.5705; Zhang et al. 2017, "Poseidon", USENIX ATC, which chooses between the two by size, as this module does.)

Every replica computes the product. It is bitwise equal only on equal hardware with deterministic operations. On CPUs
the size of the factors alone decides, so that a repeated or resumed run makes the same choice; on GPUs also the
measured bandwidth.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.engines.steps.batches_ahead import HOST
from tfpar.engines.workers.collectives import Group, pad_rows
from tfpar.reduction.gradients.all_reduce import as_vector
from tfpar.reduction.gradients.gradient_order import use_early

# A core does over 100 operations while a byte crosses the loopback interface, the fastest network between CPUs.
FLOPS_PER_BYTE = 100
# Between 100-gigabit Ethernet and NVLink; slower networks between GPUs profit from factors.
FAST_BYTES_PER_SECOND = 25e9
_TIMED_BYTES, _TIMED_REPETITIONS = 16 << 20, 3


def are_used(
    device_types: Sequence[str], equal_processors: bool, deterministic: bool, bytes_per_second: Callable[[], float]
) -> bool:
    """Return True if replicas may compute summed gradients from sufficient factors.

    Args:
        device_types: Device types of a worker, such as `"GPU"`.
        equal_processors: Whether all workers have the same hardware and settings.
        deterministic: Whether `tf.config.experimental.enable_op_determinism` was called.
        bytes_per_second: Measures the bandwidth of the all-reduce; called for GPUs only.

    Example:
        >>> are_used(["CPU"], True, False, lambda: 1e9), are_used(["GPU"], True, False, lambda: 1e9)
        (True, False)
    """
    if not equal_processors:
        return False
    if "GPU" not in device_types:
        return True
    # Without determinism, equal GPUs may round the product differently, and the replicas would drift apart.
    return deterministic and bytes_per_second() < FAST_BYTES_PER_SECOND


def bandwidth(group: Group, num_local: int) -> float:
    """Measure the bytes per second that each member sends in an all-reduce; all members must call this.

    Args:
        group: All replicas.
        num_local: Number of replicas of this process.
    """

    @tf.function(autograph=False)
    def all_reduce() -> list[tf.Tensor]:
        ones = tf.ones([_TIMED_BYTES // 4])
        return [tf.reduce_sum(group.all_reduce(ones, member)) for member in range(num_local)]

    seconds = []
    for _ in range(1 + _TIMED_REPETITIONS):  # the first call compiles
        began = time.perf_counter()
        for total in all_reduce():
            total.numpy()
        seconds.append(time.perf_counter() - began)
    return 2 * (group.num_members - 1) / group.num_members * _TIMED_BYTES / min(seconds[1:])


class Factors(NamedTuple):
    """The factors of a gradient: layer inputs `[rows, inputs]` and output gradient `[rows, outputs]`."""

    inputs: tf.Tensor
    output_gradient: tf.Tensor


def sufficient_factors_of(gradient: Any, num_examples: int, num_threads: int = 1) -> Factors | None:
    """Return the sufficient factors of a gradient; None if it has none or an all-reduce is faster.

    A gradient has factors if it is a single matmul: the Dense kernel is used once in the step and has no regularizer.

    Args:
        gradient: A gradient in the graph of a step, as returned by the tape.
        num_examples: Size of a global batch.
        num_threads: Threads that multiply on a worker, equal on all workers.
    """
    factors = _factors_of(gradient)
    rows_per_example = None if factors is None else _rows_per_example(factors.inputs)
    if rows_per_example is None:
        return None
    num_rows, (num_inputs, num_outputs) = math.ceil(rows_per_example * num_examples), gradient.shape
    return factors if are_faster(num_rows, num_inputs, num_outputs, num_threads) else None


def _factors_of(gradient: Any) -> Factors | None:
    """Return the sufficient factors of a gradient, whichever is faster; None if it has none."""
    if not isinstance(gradient, tf.Tensor) or tf.executing_eagerly() or gradient.shape.rank != 2:
        return None
    matmul = gradient.op
    if matmul.type != "MatMul" or not matmul.get_attr("transpose_a") or matmul.get_attr("transpose_b"):
        return None
    return Factors(*matmul.inputs) if all(gradient.shape) else None


def are_faster(num_rows: int, num_inputs: int, num_outputs: int, num_threads: int) -> bool:
    """Return True if factors are faster than an all-reduce of their product.

    With n workers, each sends 2(n-1)/n times the gradient in an all-reduce. With factors, it sends (n-1)/n times the
    rows in an all-gather, and multiplies as many rows in addition to its own.

    Args:
        num_rows: Rows of both factors, for the global batch.
        num_inputs: Columns of the first factor.
        num_outputs: Columns of the second factor.
        num_threads: As for `sufficient_factors_of`.

    Example:
        >>> are_faster(32, 2048, 2048, 1), are_faster(4096, 2048, 2048, 1)
        (True, False)
    """
    flops = 2 * num_rows * num_inputs * num_outputs
    saved_bytes = 4 * (2 * num_inputs * num_outputs - num_rows * (num_inputs + num_outputs))
    return flops <= FLOPS_PER_BYTE * num_threads * saved_bytes


def _rows_per_example(tensor: tf.Tensor) -> float | None:
    """Return the rows of a tensor per example; None if the shapes in the graph do not determine it.

    A layer may use the positions of a sequence as rows: `[batch, time, features]` as `[batch * time, features]`.
    """
    waiting, seen = [(tensor, 1.0)], set()
    while waiting:
        tensor, rows = waiting.pop()
        if tensor.op.type == "Placeholder":  # an argument of the step
            return rows
        if tensor.op in seen:
            continue
        seen.add(tensor.op)
        inputs = [value for value in tensor.op.inputs if value.shape.rank and value.shape[0] is None]
        if tensor.op.type == "Reshape":
            sizes = [value.shape[1:].num_elements() for value in (*inputs[:1], tensor)]
            if len(sizes) < 2 or not all(sizes):
                continue
            rows *= sizes[0] / sizes[1]
        waiting += [(value, rows) for value in reversed(inputs)]
    return None


def products(group: Group, member: int, pairs: Sequence[Factors], loss: tf.Tensor) -> list[Callable[[], tf.Tensor]]:
    """Return a function per pair of factors that gathers the pairs of all replicas and multiplies them.

    The functions may be called in any order, if it is the same on all replicas.

    Args:
        group: All replicas.
        member: Index of the calling replica in this process.
        pairs: Factors of the calling replica.
        loss: Loss of the calling replica, a scalar.
    """
    if not pairs:
        return []
    # Rows padded with zeros do not change the product.
    rows_here = tf.stack([tf.shape(factors.inputs)[0] for factors in pairs])
    sizes = group.all_gather_sizes(rows_here, member)
    with tf.device(HOST):
        most_rows = tf.unstack(tf.reduce_max(sizes, axis=0), num=len(pairs))
    return [
        functools.partial(_product, group, member, factors, num_rows, loss)
        for factors, num_rows in zip(pairs, most_rows, strict=True)
    ]


def _product(group: Group, member: int, factors: Factors, num_rows: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    num_inputs, num_outputs = factors.inputs.shape[1], factors.output_gradient.shape[1]
    both = tf.concat([factors.inputs, factors.output_gradient], 1)
    exponent, padded = pad_rows(both, num_rows)
    use_early(padded, both, factors.output_gradient, loss)
    rows = tf.reshape(group.all_gather_padded(as_vector(padded), exponent, member), [-1, num_inputs + num_outputs])
    return tf.matmul(rows[:, :num_inputs], rows[:, num_inputs:], transpose_a=True)


def num_threads() -> int:
    """Return the number of threads that this process multiplies matrices with."""
    return tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))


def processor() -> str:
    """Return a digest of the hardware and settings that determine the rounding of a matmul."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    threads = len(os.sched_getaffinity(0)), os.environ.get("TF_NUM_INTRAOP_THREADS")
    settings = [os.environ.get("TF_ENABLE_ONEDNN_OPTS"), tf.config.threading.get_intra_op_parallelism_threads()]
    return hashlib.sha256(repr((platform.machine(), kind, gpus, threads, settings)).encode()).hexdigest()
