"""The measured durations of actions: the cost of the measurement itself is subtracted."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis import step_timing
from tfpar.pipeline.schedule.simulator import simulate

pytestmark = pytest.mark.usefixtures("logical_cpus")


def one_second_each(schedule: schedules.Schedule) -> tuple[tf.Tensor, list[tf.Tensor]]:
    starts = tf.range(len(schedule.in_order()), dtype=tf.float64)
    return tf.stack([starts, starts + 1.0], axis=1), []


def test_an_action_without_operations_is_subtracted_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    overheads = {"CPU:0": 0.25, "CPU:1": 4.0}
    monkeypatch.setattr(step_timing, "empty_action_seconds", overheads.__getitem__)
    durations = step_timing.measure_durations(
        schedules.make("gpipe", num_stages=2, num_microbatches=2), one_second_each, ["CPU:0", "CPU:1"]
    )
    assert durations.forward_seconds == durations.backward_seconds == (0.75, 0.0)


def test_a_device_that_begins_before_the_clock_of_the_sender_is_read_waits_for_no_transfer() -> None:
    def early(schedule: schedules.Schedule) -> tuple[tf.Tensor, list[tf.Tensor]]:
        times, gradients = one_second_each(schedule)
        return times + tf.constant([0.0, 0.25], tf.float64), gradients

    one = schedules.make("gpipe", num_stages=2, num_microbatches=1)
    durations = step_timing.measure_durations(one, early)
    assert durations.transfer_seconds == (0.0,)
    assert simulate(one, durations).step_seconds == 5.0


def test_durations_are_those_of_a_full_micro_batch() -> None:
    """Two replicas of 8 micro-batches: the measured ones are the first three of each."""
    scale = [1.0] * 8 + [0.5] * 8

    def timed(schedule: schedules.Schedule) -> tuple[tf.Tensor, list[tf.Tensor]]:
        actions = schedule.in_order()
        times = [[number, number + (1.0 if action.microbatch < 3 else 0.5)] for number, action in enumerate(actions)]
        return tf.constant(times, tf.float64), []

    grid = schedules.make("gpipe", num_stages=1, num_microbatches=8).replicated(2)
    assert step_timing.measure_durations(grid, timed, scale=scale).forward_seconds == (1.0,)
    assert step_timing.measure_durations(grid, timed).forward_seconds == (0.75,)


def test_an_update_is_over_when_the_gpus_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(step_timing, "wait_for_gpus", lambda: waits.append(1))
    stage = SimpleNamespace(parameters=[keras.Variable([1.0, 2.0])], device="CPU:0")
    (seconds,) = step_timing.measure_updates(keras.optimizers.Adam(), SimpleNamespace(stages=[stage]))  # type: ignore[arg-type]
    assert seconds > 0
    assert len(waits) == step_timing._RUNS
