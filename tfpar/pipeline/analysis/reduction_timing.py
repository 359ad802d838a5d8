"""Measurement of the sums of gradients over the replicas of a pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import tensorflow as tf

from tfpar.pipeline.analysis.step_timing import run_seconds
from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.stage_program import StageProgram
from tfpar.reduction.gradient_addition import sum_of


def measure_reductions(replicas: Sequence[Programs]) -> tuple[float, ...]:
    """Measure the sum of the gradients of each stage over replicas, and the copies of the new weights.

    Args:
        replicas: The compiled stages of each replica.

    Returns:
        Seconds for each stage; nothing for one replica.

    Example:
        >>> measure_reductions([Programs([], (), {})])
        ()
    """
    if len(replicas) == 1:
        return ()
    return tuple(_seconds(same) for same in zip(*(one.stages for one in replicas), strict=True))


def _seconds(replicas: Sequence[StageProgram]) -> float:
    parameters, devices = replicas[0].parameters, [one.device for one in replicas]
    gradients = []
    for device in devices:
        with tf.device(device):
            gradients.append([tf.zeros(variable.shape, variable.dtype) for variable in parameters])

    def reduce() -> list[tf.Tensor]:
        copies = []
        for variable, of_one in zip(parameters, zip(*gradients, strict=True), strict=True):
            with tf.device(variable.value.device):
                total = sum_of(of_one)
            for device in devices:
                with tf.device(device):
                    copies.append(tf.identity(total))
        return copies

    return statistics.median(run_seconds(reduce))
