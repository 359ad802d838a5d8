"""The measured durations of actions: the cost of the measurement itself is subtracted."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis import step_timing

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


def test_an_action_without_operations_takes_little_time() -> None:
    assert 0 <= step_timing.empty_action_seconds("CPU:1") < 0.1


def test_an_update_is_over_when_the_gpus_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(step_timing, "wait_for_gpus", lambda: waits.append(1))
    stage = SimpleNamespace(parameters=[keras.Variable([1.0, 2.0])], device="CPU:0")
    (seconds,) = step_timing.measure_updates(keras.optimizers.Adam(), SimpleNamespace(stages=[stage]))  # type: ignore[arg-type]
    assert seconds > 0
    assert len(waits) == step_timing._RUNS
