"""1F1B with more micro-batches in flight: valid orders, hidden transfers, and no more memory than they need."""

from __future__ import annotations

import itertools

import pytest

import tfpar
from tests.strategies.test_hybrid import wide
from tests.support import small
from tfpar.engines.stages import stage_planner
from tfpar.pipeline import schedule
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.pipeline.schedule.transfer_hiding import hide_transfers, with_more_in_flight

pytestmark = pytest.mark.usefixtures("logical_cpus")


def durations(*transfer_seconds: float) -> Durations:
    stages = len(transfer_seconds) + 1
    return Durations((1.0,) * stages, (2.0,) * stages, (), (), transfer_seconds)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_any_cuts_give_a_valid_schedule_with_one_more_in_flight_before_each(num_replicas: int) -> None:
    for stages, microbatches in itertools.product((2, 3, 4), (1, 2, 8)):
        plain = schedule.make("1f1b", stages, microbatches).replicated(num_replicas)
        for cuts in itertools.chain.from_iterable(
            itertools.combinations(range(stages - 1), count) for count in range(stages)
        ):
            found = with_more_in_flight(plain, cuts)
            before = schedule.peak_activations(plain)
            more = [sum(cut >= stage for cut in cuts) for stage in range(stages)]
            schedule.check(found)
            wanted = [min(microbatches, one + extra) for one, extra in zip(before, more, strict=True)]
            assert schedule.peak_activations(found) == wanted


def test_a_slow_cut_costs_its_seconds_twice_a_step_instead_of_once_a_microbatch() -> None:
    order, slow = schedule.make("1f1b", 2, 16), durations(0.25)
    ideal = simulate(order, durations(0.0)).step_seconds
    assert simulate(order, slow).step_seconds == pytest.approx(ideal + 16 * 0.25)
    assert simulate(hide_transfers(order, slow), slow).step_seconds == pytest.approx(ideal + 0.5)


# A pipeline whose transfers take time runs one more forward pass ahead, equal to one device, where memory suffices


def trained(monkeypatch: pytest.MonkeyPatch, seconds: float, limit: int | None = None) -> tuple[list[float], list[int]]:
    """Return the losses, and the micro-batches in flight on each stage, with a transfer of some seconds."""
    monkeypatch.setattr(stage_planner, "measure_transfers", lambda devices, cut_bytes: (seconds,))
    pipeline = tfpar.Pipeline(2, 4, devices=["CPU:0", "CPU:1"], balance="parameters", memory_limit_bytes=limit)
    trainer = tfpar.Trainer(wide, pipeline, seed=0)
    losses = trainer.fit(small.data(), epochs=2, verbose=0).history["loss"]
    return losses, schedule.peak_activations(pipeline.engine.schedule_of(trainer.model))


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
