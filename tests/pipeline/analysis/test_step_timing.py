"""The measured durations of actions: the cost of the measurement itself is subtracted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis import communication_timing, step_timing
from tfpar.pipeline.analysis.communication_timing import WorkerSums, measure_all_reduces
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


# The sums of gradients over workers: a link fitted to a few messages, and the gradients of each stage over it


class Recorded:
    """Workers that are asked for sums; `seconds` is what the last message takes, 1 ms and 1 s a GB."""

    num_workers, rank = 2, 0

    def __init__(self) -> None:
        self.messages: list[int] = []

    def add_gradients(self, gradients: Sequence[tf.Tensor], weights: Sequence[keras.Variable]) -> list[tf.Tensor]:
        assert {weight.value.device[-5:] for weight in weights} == {"CPU:1"}
        self.messages.append(sum(4 * int(tf.size(gradient)) for gradient in gradients))
        return list(gradients)

    def run_seconds(self, body: Callable[[], Any]) -> list[float]:
        body()
        return [1e-3 + 1e-9 * self.messages[-1]]


def stage(*parameters: keras.Variable, gradients: Sequence[Any]) -> Any:
    backward = SimpleNamespace(weight_gradients=tuple(gradients))
    return SimpleNamespace(parameters=parameters, trace=SimpleNamespace(backward=backward), device="CPU:1")


def test_the_all_reduce_of_each_stage_follows_from_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Recorded()
    monkeypatch.setattr(communication_timing, "run_seconds", peers.run_seconds)
    dense, unused, half = (
        keras.Variable(tf.zeros([250, 1000]), dtype=dtype) for dtype in ("float32",) * 2 + ("float16",)
    )
    stages = [
        stage(dense, unused, gradients=[tf.zeros([]), None]),
        stage(half, gradients=[tf.zeros([])]),
        stage(dense, gradients=[("rows",)]),
        stage(gradients=[]),
    ]
    step = SimpleNamespace(stages=SimpleNamespace(stages=stages), loss=SimpleNamespace(parameters=[dense]))
    sums = measure_all_reduces(step, peers)  # type: ignore[arg-type]
    assert sums.seconds == pytest.approx((2e-3, 1.5e-3, 0.0, 2e-3))
    assert sums.has_rows
    assert len(set(peers.messages)) == 3  # a larger one than 1 MB is not needed
    assert sum(peers.messages) < 2 << 20  # five times these take less than 0.1 seconds with 1 Gbit/s


@pytest.mark.parametrize(("most_bytes", "count"), [(0, 2), (1 << 10, 2), (300 << 10, 3), (1 << 30, 4)])
def test_no_larger_messages_are_sent_than_the_gradients(
    most_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Recorded()
    monkeypatch.setattr(communication_timing, "run_seconds", peers.run_seconds)
    link = communication_timing.measure_link(peers, "CPU:1", most_bytes)  # type: ignore[arg-type]
    assert (link.latency_seconds, link.bytes_per_second) == pytest.approx((1e-3, 1e9))
    assert len(peers.messages) == count


def test_a_process_alone_sums_nothing() -> None:
    assert measure_all_reduces(SimpleNamespace(), None) == WorkerSums((), has_rows=False)  # type: ignore[arg-type]
