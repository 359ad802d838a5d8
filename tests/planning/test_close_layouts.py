"""Which layouts are measured because predictions cannot choose among them, and what the plan makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from tests.planning.test_ranking import BLOCKS
from tfpar.planning.close_layouts import with_measured
from tfpar.planning.comparison import compare
from tfpar.planning.costs import Curve, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, Refusal
from tfpar.planning.plan import Plan
from tfpar.planning.rows import PredictedStep

MODEL = ModelCosts("mlp", 100, 400, 400, 800, (100,) * 4, 64, Curve((64,), (0.8,)), 0.01, spread=0.02)
MACHINE = MachineCosts("GPU", 2, 2)
MIRRORED, SHARDED = "Mirrored(2)", 'Mirrored(2, shard="optimizer")'


class Device:
    """Devices whose steps take given seconds, or end in an error."""

    def __init__(self, seconds: Mapping[str, float | str], spread: float = 0.0) -> None:
        self.seconds, self.spread, self.asked = seconds, spread, list[str]()

    def measure(self, step: PredictedStep) -> PredictedStep | Refusal | None:
        self.asked.append(str(step.layout))
        found = self.seconds[str(step.layout)]
        if found == "out of memory":
            return dataclasses.replace(step, ran_out_of_memory=True)
        if isinstance(found, str):
            return Refusal(step.layout, found)
        return dataclasses.replace(step, measured_seconds=found, spread=self.spread)


def planned(device: Device, machine: MachineCosts = MACHINE, most: int = 3, model: ModelCosts = MODEL) -> Plan:
    return compare(model, machine, measure=device.measure, most_measured=most)


def test_close_layouts_are_ordered_by_their_measured_steps() -> None:
    device = Device({MIRRORED: 0.5, SHARDED: 0.4})
    plan = planned(device)
    assert sorted(device.asked) == sorted([MIRRORED, SHARDED])
    assert [str(row.layout) for row in plan.rows] == [SHARDED, MIRRORED, "SingleDevice"]
    assert [row.measured_seconds for row in plan.rows] == [0.4, 0.5, None]
    assert plan.rows[0].examples_per_second == pytest.approx(64 / 0.4)
    assert plan.rows[0].step_seconds < 0.41, "the prediction stays, for its error"


def test_the_spread_of_measured_layouts_is_that_of_the_plan() -> None:
    seconds = {MIRRORED: 0.44, SHARDED: 0.4}
    assert [row.rank for row in planned(Device(seconds)).rows] == [1, 2, 3]
    plan = planned(Device(seconds, spread=0.12))
    assert [(row.rank, str(row.layout)) for row in plan.rows] == [(1, MIRRORED), (1, SHARDED), (3, "SingleDevice")]
    assert plan.model.spread == 0.12
    plan = planned(Device(seconds, spread=0.6))
    assert plan.taken is None
    assert plan.notes[0].startswith("The measured times vary by 60 %, and more than 50 % is too noisy to rank")


def test_two_measured_layouts_are_compared_by_the_spread_of_their_own_steps() -> None:
    noisy = dataclasses.replace(MODEL, spread=0.3)
    assert [row.rank for row in planned(Device({MIRRORED: 0.44, SHARDED: 0.4}, spread=0.02), model=noisy).rows][:2] == [
        1,
        2,
    ]
    plan = planned(Device({MIRRORED: 0.44, SHARDED: 0.4}, spread=0.15), model=noisy)
    assert [(row.rank, str(row.layout)) for row in plan.rows][:2] == [(1, MIRRORED), (1, SHARDED)]


@pytest.mark.parametrize(("one_seconds", "is_ranked"), [(0.85, True), (1.3, False)], ids=["as before", "slower"])
def test_one_device_that_takes_another_time_than_before_is_a_drift(one_seconds: float, is_ranked: bool) -> None:
    plan = planned(Device({MIRRORED: 0.9, SHARDED: 0.95, "SingleDevice": one_seconds}))
    assert plan.model.spread == pytest.approx(one_seconds / 0.81 - 1)
    assert (plan.taken is not None) == is_ranked


def test_a_measurement_longer_than_the_prediction_of_another_layout_has_that_one_measured_too() -> None:
    device = Device({MIRRORED: 0.9, SHARDED: 0.95, "SingleDevice": 0.8})
    plan = planned(device)
    assert device.asked == [SHARDED, MIRRORED, "SingleDevice", SHARDED]
    assert str(plan.taken.layout if plan.taken else None) == "SingleDevice"


def test_a_measurement_shorter_than_all_predictions_has_the_close_ones_measured_too() -> None:
    device = Device({MIRRORED: 0.2, SHARDED: 0.1})
    plan = planned(device)
    assert sorted(device.asked) == sorted([MIRRORED, SHARDED])
    assert str(plan.rows[0].layout) == SHARDED


def test_the_layout_of_the_shortest_prediction_is_measured_again_where_another_one_wins() -> None:
    class DisturbedOnce(Device):
        def measure(self, step: PredictedStep) -> PredictedStep | Refusal | None:
            found = super().measure(step)
            disturbed = str(step.layout) == SHARDED and self.asked.count(SHARDED) == 1
            assert isinstance(found, PredictedStep)
            return dataclasses.replace(found, measured_seconds=0.9) if disturbed else found

    device = DisturbedOnce({MIRRORED: 0.5, SHARDED: 0.4, "SingleDevice": 0.8})
    plan = planned(device)
    assert device.asked.count(SHARDED) == 2
    assert (str(plan.rows[0].layout), plan.rows[0].measured_seconds) == (SHARDED, 0.4)


def test_a_second_measurement_that_runs_out_of_memory_changes_nothing() -> None:
    class FullAtLast(Device):
        def measure(self, step: PredictedStep) -> PredictedStep | Refusal | None:
            self.seconds = {**self.seconds, SHARDED: "out of memory"} if SHARDED in self.asked else self.seconds
            return super().measure(step)

    plan = planned(FullAtLast({MIRRORED: 0.5, SHARDED: 0.6, "SingleDevice": 0.8}))
    row = next(row for row in plan.rows if str(row.layout) == SHARDED)
    assert (row.fits, row.measured_seconds) == (None, 0.6)


def test_one_layout_of_each_kind_is_measured_before_a_second_one_of_a_kind() -> None:
    layouts = [Layout(2), Layout(2, shard="optimizer"), Layout(2, shard="weights"), Layout(num_shards=2), Layout()]
    steps = [PredictedStep(layout, 0.4 + 0.01 * place, {}) for place, layout in enumerate(layouts)]
    device = Device({MIRRORED: 0.41, "TensorParallel(2)": 0.3, "SingleDevice": 0.5, SHARDED: 0.4})
    with_measured(steps, MACHINE, device.measure, most=4)
    assert device.asked == [MIRRORED, "TensorParallel(2)", "SingleDevice", SHARDED, MIRRORED]


def test_at_most_the_given_number_is_measured() -> None:
    device = Device({MIRRORED: 0.9, SHARDED: 0.95})
    planned(device, most=1)
    assert len(device.asked) == 1
    planned(device, most=0)
    assert len(device.asked) == 1


def test_nothing_is_measured_where_one_layout_leads_by_far() -> None:
    device = Device({})
    plan = planned(device, MachineCosts("GPU", 1, 1))
    assert (device.asked, plan.rows[0].measured_seconds) == ([], None)


def test_layouts_of_devices_that_are_not_there_are_not_measured() -> None:
    device = Device({MIRRORED: 0.4, SHARDED: 0.4})
    planned(device, MachineCosts("GPU", 4, 2))
    assert device.asked == []


def test_a_layout_that_runs_out_of_memory_does_not_fit() -> None:
    plan = planned(Device({MIRRORED: "out of memory", SHARDED: 0.4}))
    row = next(row for row in plan.rows if str(row.layout) == MIRRORED)
    assert (row.fits, row.rank) == (False, None)
    assert "ran out of memory when it was measured" in str(plan)


def test_a_layout_that_cannot_train_is_named_with_its_reason() -> None:
    plan = planned(Device({MIRRORED: "the loss needs the whole batch", SHARDED: 0.4}))
    assert MIRRORED not in [str(row.layout) for row in plan.rows]
    assert "Mirrored(2) (the loss needs the whole batch)" in " ".join(str(plan).split())


def test_the_table_has_the_measured_step_and_the_predicted_one() -> None:
    text = str(planned(Device({MIRRORED: 0.5, SHARDED: 0.37})))
    line = next(number for number, one in enumerate(text.splitlines()) if one.startswith("1 "))
    assert "370 ms" in text.splitlines()[line]
    assert "measured; predicted" in text.splitlines()[line + 1]


def test_nothing_is_measured_where_no_layout_will_be_taken() -> None:
    device = Device({})
    plan = planned(device, model=dataclasses.replace(MODEL, spread=0.6))
    assert (device.asked, plan.taken) == ([], None)


def test_layouts_that_do_not_fit_are_not_measured() -> None:
    model = dataclasses.replace(MODEL, blocks=BLOCKS, slot_bytes=10**9)
    device = Device(dict.fromkeys([MIRRORED, SHARDED, "SingleDevice"], 0.4))
    planned(device, dataclasses.replace(MACHINE, memory_bytes=10**6), model=model)
    assert device.asked == []


def test_a_layout_that_is_measured_again_has_the_spread_of_its_shorter_time() -> None:
    class Disturbed(Device):
        def measure(self, step: PredictedStep) -> PredictedStep | Refusal | None:
            found = super().measure(step)
            if self.asked.count(str(step.layout)) == 1:
                return found
            return dataclasses.replace(step, measured_seconds=0.39, spread=0.01)

    rows = sorted(planned(Device({}), most=0).rows, key=lambda row: row.step_seconds)
    first, other, _ = (str(row.layout) for row in rows)
    plan = planned(Disturbed({first: 0.8, other: 0.5, "SingleDevice": 0.81}, spread=0.7))
    assert plan.taken is not None
    assert {str(row.layout): row.measured_seconds for row in plan.rows}[first] == 0.39
