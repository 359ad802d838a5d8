"""Measurement of the durations of actions, and of the timeline of a complete step."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import tf_determinism
from tfpar._compat.graphs import tf_function
from tfpar._compat.optimizers import keras_optimizer, keras_optimizer_copy
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.partition.layer_profile import wait_for_gpus
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.schedule.simulator import Durations, Span, Timeline
from tfpar.pipeline.stages.compiler import CompiledStages

Timed = Callable[[Schedule], tuple[tf.Tensor, list[tf.Tensor]]]
_RUNS = 5
_MICROBATCHES_PER_DEVICE = 3
ActionTimes = dict[Action, list[float]]  # start and end of each action, in seconds


def measure_durations(
    schedule: Schedule, timed: Timed, devices: Sequence[str] = (), scale: Sequence[float] = ()
) -> Durations:
    """Measure the durations of actions and transfers in a step with few micro-batches.

    The devices run concurrently as in training, so the durations include contention: logical CPUs share cores and
    memory. The results are medians over several runs. The host reads its clock after waiting for the device, so the
    overhead of an action without operations is subtracted.

    Args:
        schedule: The order of the actions. At most three micro-batches per device are measured.
        timed: Function that runs the actions of a schedule on a batch. It returns the start and end of each, in the
            order of `Schedule.in_order`, float64 `[actions, 2]`, and the gradients, which TensorFlow would prune
            otherwise.
        devices: The device of each stage. If empty, no overhead is subtracted.
        scale: The size of each micro-batch of the schedule relative to a full one; empty if all are full.

    Returns:
        The durations for a full micro-batch, without bytes and updates.

    Example:
        >>> def timed(schedule):  # one second for each action, one action at a time
        ...     starts = tf.range(len(schedule.in_order()), dtype=tf.float64)
        ...     return tf.stack([starts, starts + 1.0], axis=1), []
        >>> gpipe = schedules.make("gpipe", num_stages=2, num_microbatches=2)
        >>> measure_durations(gpipe, timed).forward_seconds
        (1.0, 1.0)
    """
    num_stages, num_devices = schedule.num_stages, schedule.num_devices
    num_microbatches = min(_MICROBATCHES_PER_DEVICE * num_devices, schedule.microbatches_per_replica)
    short = schedules.make(schedule.name, num_stages, num_microbatches, num_devices).replicated(schedule.num_replicas)
    runs = _measure_runs(short, timed)
    sizes = _scale_of(short, schedule, scale)

    seconds: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for times in runs:
        for (kind, stage, microbatch), (begin, end) in times.items():
            seconds[kind, stage].append((end - begin) / sizes[microbatch])

    empty = {device: empty_action_seconds(device) for device in set(devices)}
    overhead_seconds = [empty[device] for device in devices] or [0.0] * num_stages

    def median_seconds(kind: str) -> tuple[float, ...]:
        medians = (statistics.median(seconds[kind, stage] or [0.0]) for stage in range(num_stages))
        return tuple(max(0.0, median - overhead) for median, overhead in zip(medians, overhead_seconds, strict=True))

    backward = median_seconds("B")
    return Durations(
        forward_seconds=median_seconds("F"),
        backward_seconds=backward,
        input_gradient_seconds=backward,
        weight_gradient_seconds=median_seconds("W"),
        transfer_seconds=tuple(_transfer_seconds(short, runs, cut) for cut in range(num_stages - 1)),
    )


def _scale_of(short: Schedule, schedule: Schedule, scale: Sequence[float]) -> list[float]:
    """Return the sizes of the micro-batches of the short schedule, which are the first ones of each replica."""
    count, others = short.microbatches_per_replica, schedule.microbatches_per_replica - short.microbatches_per_replica
    numbers = [number + short.replica_of(number) * others for number in range(count * short.num_replicas)]
    return [scale[number] for number in numbers] if scale else [1.0] * len(numbers)


def empty_action_seconds(device: str) -> float:
    """Measure the overhead of timing an action, in seconds, with an action without operations.

    Example:
        >>> empty_action_seconds("CPU:0") >= 0
        True
    """

    def timed(scalar: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            before = tf.identity(scalar)
            with tf.control_dependencies([before]):
                begin = tf_function.unordered_timestamp()
            with tf.control_dependencies([begin]):
                done = tf.identity(before)
            with tf.control_dependencies([done]):
                return tf_function.unordered_timestamp() - begin

    run, scalar = tf.function(timed, autograph=False), tf.zeros([])
    with tf_determinism.suspended():
        return statistics.median([float(run(scalar)) for _ in range(_RUNS)][1:])


def _transfer_seconds(schedule: Schedule, runs: Sequence[ActionTimes], cut: int) -> float:
    """Return the median delay between F before and after a cut, where the later device is idle in between.

    It is clipped at 0, because the later device may start before the earlier one has read the clock.
    """
    orders = schedule.actions[schedule.device_of(cut + 1) :: schedule.num_devices]
    pairs = [pair for order in orders for pair in zip((None, *order), order, strict=False)]
    seconds = []
    for times in runs:
        for previous, action in pairs:
            if action.kind == "F" and action.stage == cut + 1:
                sent = times[Action("F", cut, action.microbatch)][1]
                if previous is None or times[previous][1] < sent:
                    seconds.append(times[action][0] - sent)
    return max(0.0, statistics.median(seconds or [0.0]))


def measure_updates(optimizer: keras.Optimizer, stages: CompiledStages, num_replicas: int = 1) -> tuple[float, ...]:
    """Estimate the optimizer's update of each stage, in seconds.

    The function measures the update of the largest weight of a stage, and scales it by the number of parameters.

    Args:
        optimizer: The optimizer. A copy of it updates a copy of the weight.
        stages: The compiled stages.
        num_replicas: Number of replicas, which share the update.

    Example:
        >>> from types import SimpleNamespace
        >>> stage = SimpleNamespace(parameters=[keras.Variable([1.0, 2.0])], device="CPU:0")
        >>> len(measure_updates(keras.optimizers.SGD(), SimpleNamespace(stages=[stage])))
        1
    """
    seconds = (_update_seconds(optimizer, stage.parameters, stage.device) for stage in stages.stages)
    return tuple(stage_seconds / num_replicas for stage_seconds in seconds)


def _update_seconds(optimizer: keras.Optimizer, parameters: Sequence[keras.Variable], device: str) -> float:
    if not parameters:
        return 0.0
    sizes = [int(np.prod(variable.shape)) for variable in parameters]
    largest = parameters[int(np.argmax(sizes))]
    copy = keras_optimizer_copy.unbuilt_copy(keras_optimizer_copy.optimizer_of_weight(optimizer, largest))
    with tf.device(device):
        weight = keras.Variable(tf.identity(largest.value), dtype=largest.dtype)
        copy.build([weight])
        gradient = tf.zeros(weight.shape, weight.dtype)

    def update() -> None:
        with tf.device(device), keras_optimizer.one_device_optimizer():
            copy.apply([gradient], [weight])

    return min(run_seconds(update)) * sum(sizes) / max(sizes)


def run_seconds(body: Callable[[], Any]) -> list[float]:
    """Compile a function, and return the seconds of several runs after the first.

    Example:
        >>> len(run_seconds(lambda: tf.zeros([])))
        4
    """
    run = tf.function(body, autograph=False)
    seconds: list[float] = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        wait_for_gpus()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def measure_step(schedule: Schedule, timed: Timed) -> Timeline:
    """Measure the timeline of a complete step, without the optimizer's update.

    Args:
        schedule: The order of the actions.
        timed: As for `measure_durations`.

    Returns:
        The timeline of the run with the median step time, without peak memory.

    Example:
        >>> def timed(schedule):  # one second for each action, one action at a time
        ...     starts = tf.range(len(schedule.in_order()), dtype=tf.float64)
        ...     return tf.stack([starts, starts + 1.0], axis=1), []
        >>> measure_step(schedules.make("gpipe", num_stages=2, num_microbatches=2), timed).step_seconds
        8.0
    """

    def step_seconds(times: ActionTimes) -> float:
        return max(end for _, end in times.values()) - min(begin for begin, _ in times.values())

    runs = sorted(_measure_runs(schedule, timed), key=step_seconds)
    times = runs[(len(runs) - 1) // 2]
    start = min(begin for begin, _ in times.values())
    spans = [
        Span(action, schedule.device_of(action.stage, action.microbatch), begin - start, end - start)
        for action, (begin, end) in times.items()
    ]
    spans.sort(key=lambda span: span.begin_seconds)
    return Timeline(len(schedule.actions), tuple(spans), step_seconds(times), ())


def _measure_runs(schedule: Schedule, timed: Timed) -> list[ActionTimes]:
    """Return the start and end of each action in several runs after the first."""
    actions = schedule.in_order()
    run = tf.function(lambda: timed(schedule), autograph=False)
    with tf_determinism.suspended():
        return [dict(zip(actions, run()[0].numpy().tolist(), strict=True)) for _ in range(_RUNS)][1:]
