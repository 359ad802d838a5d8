"""The sums of gradients over workers: a link fitted to a few messages, and the gradients of each stage over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfpar.pipeline.analysis import reduction_timing
from tfpar.pipeline.analysis.reduction_timing import WorkerSums, measure_all_reduces

pytestmark = pytest.mark.usefixtures("logical_cpus")


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
    monkeypatch.setattr(reduction_timing, "run_seconds", peers.run_seconds)
    dense, unused, half = (
        keras.Variable(tf.zeros([250, 1000]), dtype=dtype) for dtype in ("float32",) * 2 + ("float16",)
    )
    stages = [
        stage(dense, unused, gradients=[tf.zeros([]), None]),
        stage(half, gradients=[tf.zeros([])]),
        stage(dense, gradients=[("rows",)]),
        stage(gradients=[]),
    ]
    programs = SimpleNamespace(programs=SimpleNamespace(stages=stages), loss=SimpleNamespace(parameters=[dense]))
    sums = measure_all_reduces(programs, peers)  # type: ignore[arg-type]
    assert sums.seconds == pytest.approx((2e-3, 1.5e-3, 0.0, 2e-3))
    assert sums.has_rows
    assert len(set(peers.messages)) == 3  # a larger one than 1 MB is not needed
    assert sum(peers.messages) < 2 << 20  # five times these take less than 0.1 seconds with 1 Gbit/s


@pytest.mark.parametrize(("most_bytes", "count"), [(0, 2), (1 << 10, 2), (300 << 10, 3), (1 << 30, 4)])
def test_no_larger_messages_are_sent_than_the_gradients(
    most_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Recorded()
    monkeypatch.setattr(reduction_timing, "run_seconds", peers.run_seconds)
    link = reduction_timing.measure_link(peers, "CPU:1", most_bytes)  # type: ignore[arg-type]
    assert (link.latency_seconds, link.bytes_per_second) == pytest.approx((1e-3, 1e9))
    assert len(peers.messages) == count


def test_a_process_alone_sums_nothing() -> None:
    assert measure_all_reduces(SimpleNamespace(), None) == WorkerSums((), has_rows=False)  # type: ignore[arg-type]
