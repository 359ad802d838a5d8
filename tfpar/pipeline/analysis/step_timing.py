"""What a step will take and what it took: the durations of its actions, and the timeline of a real step."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_model
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.schedule.simulator import Durations, Span, Timeline

Timed = Callable[[Sequence[Action]], tuple[tf.Tensor, list[tf.Tensor]]]
_RUNS = 5
_MICROBATCHES_PER_DEVICE = 3
Moments = dict[Action, list[float]]  # when each began and ended


def measure_durations(schedule: Schedule, timed: Timed) -> Durations:
    """Measure how long the actions of each stage take, and what travels between them, in a step cut short.

    Devices work beside each other as they do in training, so what they take from each other, as logical CPUs do that
    share threads and memory, is in the times: an action that had the machine to itself would spread over all cores. The
    first run is left out, then medians are taken.

    Args:
        schedule: The order of actions; some micro-batches of it are run.
        timed: Runs actions on a batch and returns when each began and ended, float64 `[actions, 2]`, and gradients
            that must not be dropped.
    """
    num_stages, num_devices = schedule.num_stages, schedule.num_devices
    num_microbatches = min(_MICROBATCHES_PER_DEVICE * num_devices, schedule.num_microbatches)
    short = schedules.make(schedule.name, num_stages, num_microbatches, num_devices)
    runs = _run(short, timed)

    seconds: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for moments in runs:
        for (kind, stage, _), (begin, end) in moments.items():
            seconds[kind, stage].append(end - begin)

    def of(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(seconds[kind, stage] or [0.0]) for stage in range(num_stages))

    backward = of("B")
    return Durations(
        forward_seconds=of("F"),
        backward_seconds=backward,
        input_gradient_seconds=backward,
        weight_gradient_seconds=of("W"),
        transfer_seconds=tuple(_transfer_seconds(short, runs, cut) for cut in range(num_stages - 1)),
    )


def _transfer_seconds(schedule: Schedule, runs: Sequence[Moments], cut: int) -> float:
    """Return how long a device waits for a value from the stage before a cut, where it waits for nothing else."""
    order = schedule.actions[schedule.device_of(cut + 1)]
    seconds = []
    for moments in runs:
        for before, action in zip((None, *order), order, strict=False):
            if action.kind == "F" and action.stage == cut + 1:
                sent = moments[Action("F", cut, action.microbatch)][1]
                if before is None or moments[before][1] < sent:
                    seconds.append(moments[action][0] - sent)
    return statistics.median(seconds or [0.0])


def measure_updates(optimizer: keras.Optimizer, programs: Programs) -> tuple[float, ...]:
    """Estimate how long the optimizer takes on each stage: measured on its largest weight, by the bytes of all.

    Args:
        optimizer: A copy of it works on a copy of the weight.
        programs: The stages, with their weights.
    """
    return tuple(_update_seconds(optimizer, program.parameters, program.device) for program in programs.stages)


def _update_seconds(optimizer: keras.Optimizer, parameters: Sequence[keras.Variable], device: str) -> float:
    if not parameters:
        return 0.0
    sizes = [int(np.prod(variable.shape)) for variable in parameters]
    largest = parameters[int(np.argmax(sizes))]
    copy = type(optimizer).from_config(optimizer.get_config())
    with tf.device(device):
        weight = keras.Variable(tf.identity(largest.value), dtype=largest.dtype)
        copy.build([weight])
        gradient = tf.zeros(weight.shape, weight.dtype)

    def update() -> tf.Tensor:
        with tf.device(device), keras_model.one_device_optimizer():
            copy.apply([gradient], [weight])
        return tf.constant(0)

    run = tf.function(update, autograph=False)
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        run().numpy()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]) * sum(sizes) / max(sizes)


def measure_step(schedule: Schedule, timed: Timed) -> Timeline:
    """Run the actions of a whole step, without an update, and return when each ran.

    Args:
        schedule: The order of actions.
        timed: As for `measure_durations`.

    Returns:
        The timeline of the median of some runs; memory is not measured.
    """

    def seconds_of(moments: Moments) -> float:
        return max(end for _, end in moments.values()) - min(begin for begin, _ in moments.values())

    runs = sorted(_run(schedule, timed), key=seconds_of)
    moments = runs[(len(runs) - 1) // 2]
    start = min(begin for begin, _ in moments.values())
    spans = [
        Span(action, schedule.device_of(action.stage), begin - start, end - start)
        for action, (begin, end) in moments.items()
    ]
    spans.sort(key=lambda span: span.begin_seconds)
    return Timeline(schedule.num_devices, tuple(spans), seconds_of(moments), ())


def _run(schedule: Schedule, timed: Timed) -> list[Moments]:
    """Run a schedule some times, and return when each action began and ended; the first run is left out."""
    actions = schedule.in_order()
    run = tf.function(lambda: timed(actions), autograph=False)
    return [dict(zip(actions, run()[0].numpy().tolist(), strict=True)) for _ in range(_RUNS)][1:]
