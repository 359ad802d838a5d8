"""1F1B with more micro-batches in flight: valid orders, hidden transfers, and no more memory than they need."""

from __future__ import annotations

import itertools

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.pipeline.schedule.transfer_hiding import hiding_transfers, with_more_in_flight


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
    assert simulate(hiding_transfers(order, slow), slow).step_seconds == pytest.approx(ideal + 0.5)


def test_stages_after_the_last_slow_cut_hold_no_more() -> None:
    order = schedule.make("1f1b", 4, 16)
    found = hiding_transfers(order, durations(0.0, 0.25, 0.0))
    assert schedule.peak_activations(order) == [4, 3, 2, 1]
    assert schedule.peak_activations(found) == [5, 4, 2, 1]


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_other_schedules_stay(name: str) -> None:
    order = schedule.make(name, 2, 8)
    assert hiding_transfers(order, durations(0.25)) == order
