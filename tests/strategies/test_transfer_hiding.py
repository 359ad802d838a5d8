"""A pipeline whose transfers take time runs one more forward pass ahead, equal to one device, where memory suffices."""

from __future__ import annotations

import pytest

import tfpar
from tests.strategies.test_hybrid import wide
from tests.support import small
from tfpar.pipeline import schedule
from tfpar.strategies import stage_planner

pytestmark = pytest.mark.usefixtures("logical_cpus")


def trained(monkeypatch: pytest.MonkeyPatch, seconds: float, limit: int | None = None) -> tuple[list[float], list[int]]:
    """Return the losses, and the micro-batches in flight on each stage, with a transfer of some seconds."""
    monkeypatch.setattr(stage_planner, "measure_transfers", lambda devices, cut_bytes: (seconds,))
    pipeline = tfpar.Pipeline(2, 4, devices=["CPU:0", "CPU:1"], balance="parameters", memory_limit_bytes=limit)
    trainer = tfpar.Trainer(wide, pipeline, seed=0)
    losses = trainer.fit(small.data(), epochs=2, verbose=0).history["loss"]
    return losses, schedule.peak_activations(pipeline.schedule_of(trainer.model))


def test_it_gives_the_losses_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0).fit(small.data(), epochs=2, verbose=0).history["loss"]
    losses, in_flight = trained(monkeypatch, 1.0)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert in_flight == [3, 1]


def test_nothing_changes_without_transfers_that_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(monkeypatch, 0.0)[1] == [2, 1]


def test_a_memory_limit_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device needs 12,672 bytes with two micro-batches in flight, and 13,056 with three."""
    assert trained(monkeypatch, 1.0, limit=12_900)[1] == [2, 1]
