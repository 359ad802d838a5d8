"""Measurement of transfers between stages, and of sums of gradients over replicas and workers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.analysis.step_timing import run_seconds
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.step_compiler import CompiledStep
from tfpar.pipeline.schedule.links import Link, fit_link
from tfpar.pipeline.stages.compiled_stage import CompiledStage
from tfpar.pipeline.stages.compiler import CompiledStages
from tfpar.placement.owners import num_bytes
from tfpar.reduction.gradients.gradient_addition import sum_of

# Messages to fit a link to: latency dominates the smallest, and the largest is as large as several packs. Together they
# take a fraction of a second on a network of 1 Gbit/s.
_MESSAGE_BYTES = (16 << 10, 256 << 10, 1 << 20, 8 << 20)
_GRADIENTS_PER_MESSAGE = 4
_ROUND_TRIPS = 4  # of a transfer


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
    return tuple(_transfer_seconds(*cut) if crossing else 0.0 for cut, crossing in zip(cuts, crosses, strict=True))


def _transfer_seconds(device: str, other: str, num_bytes: int) -> float:
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


def measure_reductions(replicas: Sequence[CompiledStages]) -> tuple[float, ...]:
    """Measure the sum of the gradients of each stage over replicas, and the copies of the new weights, in seconds.

    Example:
        >>> measure_reductions([CompiledStages([], (), {})])
        ()
    """
    if len(replicas) == 1:
        return ()
    return tuple(_reduction_seconds(copies) for copies in zip(*(compiled.stages for compiled in replicas), strict=True))


def _reduction_seconds(replicas: Sequence[CompiledStage]) -> float:
    parameters, devices = replicas[0].parameters, [stage.device for stage in replicas]
    gradients = []
    for device in devices:
        with tf.device(device):
            gradients.append([tf.zeros(variable.shape, variable.dtype) for variable in parameters])

    def reduce() -> list[tf.Tensor]:
        copies = []
        for variable, summands in zip(parameters, zip(*gradients, strict=True), strict=True):
            with tf.device(variable.value.device):
                total = sum_of(summands)
            for device in devices:
                with tf.device(device):
                    copies.append(tf.identity(total))
        return copies

    return statistics.median(run_seconds(reduce))


class WorkerSums(NamedTuple):
    """The sums of gradients over the workers of a job.

    Args:
        seconds: Duration of the all-reduce of the dense gradients of each stage; empty for one worker.
        has_rows: Whether there are also sparse gradient rows, which are gathered and not measured.
    """

    seconds: tuple[float, ...] = ()
    has_rows: bool = False


def measure_all_reduces(step: CompiledStep, peers: Peers | None) -> WorkerSums:
    """Estimate the all-reduce of the gradients of each stage from measured all-reduces of a few sizes.

    All workers must call this.

    Args:
        step: The compiled stages and the loss.
        peers: The other workers, if the job has several.
    """
    if peers is None:
        return WorkerSums()
    gradients = [_gradient_bytes(stage) for stage in step.stages.stages]
    loss_bytes = sum(map(num_bytes, step.loss.parameters))  # summed with those of the last stage
    sizes = [size + loss_bytes * (stage == len(gradients) - 1) for stage, (size, _) in enumerate(gradients)]
    link = measure_link(peers, step.stages.stages[-1].device, max(sizes))
    return WorkerSums(tuple(link.seconds(size) if size else 0.0 for size in sizes), any(rows for _, rows in gradients))


def measure_link(peers: Peers, device: str, max_bytes: int) -> Link:
    """Measure latency and bandwidth of an all-reduce over all workers, which must all call this.

    Args:
        peers: The workers.
        device: A device of this worker, the same on all.
        max_bytes: Maximum bytes of an all-reduce in a step. Much larger messages are not measured.
    """
    larger = [size for before, size in itertools.pairwise(_MESSAGE_BYTES) if before < max_bytes]
    sizes = [*_MESSAGE_BYTES[:1], *(larger or _MESSAGE_BYTES[1:2])]
    return fit_link(sizes, [_all_reduce_seconds(peers, device, size) for size in sizes])


def _all_reduce_seconds(peers: Peers, device: str, size_bytes: int) -> float:
    with tf.device(device):
        number = size_bytes // _GRADIENTS_PER_MESSAGE // tf.float32.size
        weights = [keras.Variable(tf.zeros([number]), dtype="float32") for _ in range(_GRADIENTS_PER_MESSAGE)]
        gradients = [tf.zeros([number]) for _ in weights]
    return statistics.median(run_seconds(lambda: peers.add_gradients(gradients, weights)))


def _gradient_bytes(stage: CompiledStage) -> tuple[int, bool]:
    """Return the bytes of the dense gradients of a stage, and whether it has sparse gradient rows."""
    gradients = stage.trace.backward.weight_gradients
    pairs = list(zip(stage.parameters, gradients, strict=True))
    dense = [parameter for parameter, gradient in pairs if not isinstance(gradient, tuple | type(None))]
    return sum(map(num_bytes, dense)), any(isinstance(gradient, tuple) for gradient in gradients)
