"""What a step will take and what it took: durations measured action by action, and the timeline of a real step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpar import _compat
from tfpar.pipeline.programs import Programs
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.simulate import Durations, Span, Timeline

Timed = Callable[[Sequence[Action], bool], tuple[tf.Tensor, list[tf.Tensor]]]
_RUNS = 5
_MICROBATCHES = 3


def measure_durations(schedule: Schedule, timed: Timed) -> Durations:
    """Measure how long the actions of each stage take, and what stands between them, one after the other.

    Nothing runs beside an action, so that its time is its own; what devices take from each other when they share
    memory or threads is not seen. The first run is left out, then medians are taken.

    Args:
        schedule: Which actions there are.
        timed: Runs actions on a batch and returns when each began and ended, float64 `[actions, 2]`, and gradients
            that must not be dropped; its second argument says whether each waits for all before it.
    """
    num_stages, splits = schedule.num_stages, schedule.splits_backward
    numbers = range(min(_MICROBATCHES, schedule.num_microbatches))
    actions = [action for number in numbers for action in _there_and_back(num_stages, number, splits)]
    run = tf.function(lambda: timed(actions, True), autograph=False)
    moments = np.array([run()[0].numpy() for _ in range(_RUNS)][1:])
    seconds = dict(zip(actions, np.median(moments[:, :, 1] - moments[:, :, 0], axis=0), strict=True))

    def of(kind: str) -> tuple[float, ...]:
        found = [[seconds[a] for a in actions if a.kind == kind and a.stage == s] for s in range(num_stages)]
        return tuple(float(statistics.median(values)) if values else 0.0 for values in found)

    gaps = np.median(moments[:, 1:, 0] - moments[:, :-1, 1], axis=0)
    pairs = list(zip(actions, actions[1:], gaps, strict=False))
    transfers = [
        [gap for one, other, gap in pairs if one.kind == other.kind == "F" and one.stage == cut]
        for cut in range(num_stages - 1)
    ]
    backward = of("B")
    return Durations(
        forward_seconds=of("F"),
        backward_seconds=backward,
        input_gradient_seconds=backward,
        weight_gradient_seconds=of("W"),
        transfer_seconds=tuple(float(statistics.median(values)) for values in transfers),
    )


def _there_and_back(num_stages: int, number: int, splits: bool) -> list[Action]:
    forward = [Action("F", stage, number) for stage in range(num_stages)]
    backward = [Action("B", stage, number) for stage in reversed(range(num_stages))]
    return forward + backward + ([Action("W", stage, number) for stage in range(num_stages)] if splits else [])


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
        with tf.device(device), _compat.one_device_optimizer():
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
    actions = schedule.in_order()
    run = tf.function(lambda: timed(actions, False), autograph=False)
    runs = sorted(
        [run()[0].numpy() for _ in range(_RUNS)][1:], key=lambda moments: float(moments.max() - moments.min())
    )
    moments = runs[(len(runs) - 1) // 2]
    moments = moments - moments.min()
    spans = [
        Span(action, schedule.device_of(action.stage), float(begin), float(end))
        for action, (begin, end) in zip(actions, moments, strict=True)
    ]
    spans.sort(key=lambda span: span.begin_seconds)
    return Timeline(schedule.num_devices, tuple(spans), float(moments.max()), ())
