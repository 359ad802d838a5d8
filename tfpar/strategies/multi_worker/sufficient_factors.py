"""Sufficient factors: the two factors of a Dense kernel's gradient, gathered if they are smaller than the product.

    kernel [2048, 2048] of a Dense layer, 16 examples on each of two workers:

    gradient   = inputs' x deltas    [2048, 16] x [16, 2048] → [2048, 2048]      all-reduce: 16.8 MB a worker
    factors    = inputs, deltas      [16, 2048] and [16, 2048]                   all-gather:  0.3 MB a worker

The gradient of the global batch is the product of all rows of both factors. So an all-gather and one matmul give the
exact sum. (Xie et al. 2014, "Distributed Machine Learning via Sufficient Factor Broadcasting",
arXiv 1409.5705; Zhang et al. 2017, "Poseidon", USENIX ATC, which chooses between the two by size, as this module does.)
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import Group


class Factors(NamedTuple):
    """The factors of one gradient, `[rows, inputs]` and `[rows, outputs]`, and the control inputs of an update."""

    inputs: tf.Tensor
    deltas: tf.Tensor
    barrier: Sequence[tf.Operation]


def sufficient_factors_of(gradient: Any, num_rows: int) -> Factors | None:
    """Return the sufficient factors of a gradient, None if it has none or if an all-reduce sends fewer bytes.

    A gradient has factors if it is the matmul of one use of a Dense kernel in the step, without a penalty on the
    kernel. Then every worker gathers all rows and multiplies them.

    Args:
        gradient: A gradient from the graph of a step.
        num_rows: Examples of a global batch.
    """
    if not isinstance(gradient, tf.Tensor) or tf.executing_eagerly() or gradient.shape.rank != 2:
        return None
    outer, inner = gradient.op, gradient.op.inputs[0].op if gradient.op.type == "Identity" else gradient.op
    if inner.type != "MatMul" or not inner.get_attr("transpose_a") or inner.get_attr("transpose_b"):
        return None
    inputs, deltas = inner.inputs[:2]
    num_inputs, num_outputs = gradient.shape
    if not (num_inputs and num_outputs) or 2 * num_rows * (num_inputs + num_outputs) > num_inputs * num_outputs:
        return None
    return Factors(inputs, deltas, outer.control_inputs)


def products(group: Group, member: int, many: Sequence[Factors]) -> list[tf.Tensor]:
    """Return the gradients of the global batch from the factors of all replicas.

    Args:
        group: All replicas.
        member: The local number of the calling replica.
        many: The factors of the calling replica.
    """
    if not many:
        return []
    # Padding rows of zeros do not change the product.
    rows_here = tf.stack([tf.shape(factors.inputs)[0] for factors in many])
    most_rows = tf.unstack(tf.reduce_max(group.all_gather_equal_shapes(rows_here[None], member), axis=0), num=len(many))
    results = []
    for factors, num_rows in zip(many, most_rows, strict=True):
        num_inputs = factors.inputs.shape[1]
        rows = group.all_gather_padded(tf.concat([factors.inputs, factors.deltas], 1), num_rows, member)
        with tf.control_dependencies(factors.barrier):
            results.append(tf.matmul(rows[:, :num_inputs], rows[:, num_inputs:], transpose_a=True))
    return results


def processor() -> str:
    """Return a digest of the hardware and settings on which the rounding of a matmul depends."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    threads = len(os.sched_getaffinity(0)), os.environ.get("TF_NUM_INTRAOP_THREADS")
    settings = [os.environ.get("TF_ENABLE_ONEDNN_OPTS"), tf.config.threading.get_intra_op_parallelism_threads()]
    return hashlib.sha256(repr((platform.machine(), kind, gpus, threads, settings)).encode()).hexdigest()
