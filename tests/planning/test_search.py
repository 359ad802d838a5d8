"""The search of a plan: candidates, what cannot fit, the order, the budget, ties, and layouts that fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from tfpar.layout import Layout
from tfpar.planning.candidates import candidates, not_considered
from tfpar.planning.fitting import least_bytes
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Devices, Measured, Plan
from tfpar.planning.search import OUT_OF_MEMORY, Failed, Search, relative_step

FACTS = ModelFacts("mlp", 100, 64, 400, (200, 100, 50, 50), 800, num_blocks=5, divides_layers=True)
WHOLE = dataclasses.replace(FACTS, num_blocks=0, divides_layers=False, uncut="It draws")
ONE, TWO, FOUR, PIPELINE = Layout(), Layout(2), Layout(4), Layout(1, 2, 8)
CPUS = Devices("CPU", 2)


def settings_of(layout: Layout) -> dict[str, Any]:
    return layout.settings


class Machine:
    """Devices on which a layout takes some seconds a step, and some seconds to be measured."""

    def __init__(self, step_seconds: Mapping[Layout, float], took_seconds: float = 10.0) -> None:
        self.seconds, self._step_seconds, self._took_seconds = 0.0, step_seconds, took_seconds
        self.measured: list[Layout] = []
        self.failures: dict[Layout, Failed] = {}

    def measure(self, layout: Layout) -> Measured | Failed:
        self.seconds += self._took_seconds
        self.measured.append(layout)
        step = self._step_seconds.get(layout, 1.0)
        return self.failures.get(layout, Measured((step, 1.01 * step, 1.02 * step), 1000))

    def plan(self, budget_seconds: float = 1000.0, facts: ModelFacts = WHOLE, devices: Devices = CPUS) -> Plan:
        search = Search(self.measure, budget_seconds, 0.0, lambda: self.seconds)
        return search.plan(facts, devices, self.measure(ONE), settings_of)


def ranks(plan: Plan) -> list[tuple[int, str]]:
    return [(row.rank, str(row.layout)) for row in plan.rows]


def reasons(plan: Plan) -> dict[str, str]:
    return {str(layout): reason for layout, reason in plan.others}


def test_layouts_are_ranked_by_their_measured_steps() -> None:
    plan = Machine({ONE: 0.7, TWO: 0.4, Layout(2, shard="optimizer"): 0.5}).plan()
    assert ranks(plan) == [(1, "Mirrored(2)"), (2, 'Mirrored(2, shard="optimizer")'), (3, "SingleDevice")]
    assert plan.best is plan.rows[0]
    assert plan.best.step_seconds == pytest.approx(0.404)


def test_layouts_within_their_spreads_have_one_rank_and_the_simplest_is_first() -> None:
    plan = Machine({ONE: 0.402, TWO: 0.4, Layout(2, shard="optimizer"): 0.5}).plan()
    assert ranks(plan) == [(1, "SingleDevice"), (1, "Mirrored(2)"), (3, 'Mirrored(2, shard="optimizer")')]


def test_no_layout_begins_that_would_end_after_the_budget() -> None:
    machine = Machine({ONE: 0.7, TWO: 0.4})
    plan = machine.plan(budget_seconds=25)
    assert machine.measured == [ONE, TWO]
    assert plan.seconds == 20
    assert reasons(plan) == {'Mirrored(2, shard="optimizer")': "the budget of 25 s was spent"}


def test_one_layout_of_several_devices_is_measured_whatever_the_budget() -> None:
    machine = Machine({})
    machine.plan(budget_seconds=1)
    assert machine.measured == [ONE, TWO]


def test_the_two_fastest_are_measured_again_in_seconds_that_are_left() -> None:
    machine = Machine({ONE: 0.7, TWO: 0.4, Layout(2, shard="optimizer"): 0.5})
    plan = machine.plan(budget_seconds=50)
    assert machine.measured[3:] == [TWO, Layout(2, shard="optimizer")]
    assert [len(row.measured.laps) for row in plan.rows] == [6, 6, 3]


def test_a_family_far_from_the_fastest_is_measured_once() -> None:
    machine = Machine({ONE: 0.7, TWO: 0.4, PIPELINE: 0.9, Layout(1, 2, 8, "zero_bubble"): 0.9}, took_seconds=1.0)
    plan = machine.plan(facts=dataclasses.replace(FACTS, divides_layers=False))
    assert sum(layout.kind == "pipeline" for layout in machine.measured) == 1
    assert reasons(plan)["Pipeline(2, 4)"] == "others like it took more than 1.50 times the fastest"


def test_what_cannot_fit_is_dropped_with_its_bytes_and_is_not_measured() -> None:
    machine = Machine({})
    # One device is measured, as the fewest bytes of a layout are no peak.
    plan = machine.plan(devices=Devices("GPU", 2, memory_bytes=1400))
    assert machine.measured[:2] == [ONE, Layout(2, shard="optimizer")]
    assert reasons(plan) == {"Mirrored(2)": "needs at least 1.60 kB, a device has 1.40 kB"}


def test_a_layout_out_of_memory_is_named_and_the_others_are_measured() -> None:
    machine = Machine({})
    machine.failures = {ONE: Failed(OUT_OF_MEMORY), TWO: Failed(OUT_OF_MEMORY)}
    plan = machine.plan()
    assert ranks(plan) == [(1, 'Mirrored(2, shard="optimizer")')]
    assert reasons(plan) == {"SingleDevice": "ran out of memory", "Mirrored(2)": "ran out of memory"}


def test_a_refusal_is_that_of_the_whole_family() -> None:
    machine = Machine({})
    machine.failures = {TWO: Failed("'mixer' mixes examples", is_refusal=True)}
    plan = machine.plan()
    assert ranks(plan) == [(1, "SingleDevice")]
    assert set(reasons(plan)) == {"Mirrored(2)", 'Mirrored(2, shard="optimizer")'}
    assert set(reasons(plan).values()) == {"'mixer' mixes examples"}


def test_a_plan_without_any_layout_has_no_best_row() -> None:
    machine = Machine({})
    machine.failures = {ONE: Failed(OUT_OF_MEMORY)}
    plan = machine.plan(devices=Devices("GPU", 1, memory_bytes=100))
    assert (plan.best, plan.strategy, plan.rows) == (None, None, ())


@pytest.mark.parametrize(
    ("facts", "num_devices", "num_workers", "some", "none"),
    [
        (FACTS, 1, 1, ["SingleDevice"], ["Mirrored"]),
        (FACTS, 2, 1, ["Mirrored(2)", 'Mirrored(2, shard="weights")', "Pipeline(2, 8)", "TensorParallel(2)"], ["re"]),
        (WHOLE, 2, 1, ["Mirrored(2)"], ["Pipeline", "Tensor", "weights"]),
        (FACTS, 4, 1, ["Mirrored(2)", "Pipeline(4, 16)", "Hybrid(2 x Pipeline(2, 8))"], ["workers"]),
        (dataclasses.replace(FACTS, num_blocks=2), 4, 1, ["Pipeline(2, 8)"], ["Pipeline(4"]),
        (dataclasses.replace(FACTS, batch=3), 4, 1, ["Mirrored(2)", "Pipeline(2, 2)"], ["Mirrored(4)", "(2, 4"]),
        (FACTS, 1, 2, ["SingleDevice", "MultiWorker(2)", "Pipeline(2, 8, across_workers, workers=2)"], ["Mirrored"]),
        (FACTS, 2, 2, ["Hybrid(2 x Pipeline(2, 8), workers=2)", "Hybrid(2 x TensorParallel(2), workers=2)"], []),
    ],
)
def test_candidates_are_what_model_batch_and_devices_allow(
    facts: ModelFacts, num_devices: int, num_workers: int, some: list[str], none: list[str]
) -> None:
    names = [str(layout) for layout in candidates(facts, num_devices, num_workers)]
    assert len(names) == len(set(names))
    assert set(some) <= set(names)
    assert not [name for name in names for part in none if part != "re" and part in name]
    assert not any("recompute" in name for name in names)


def test_recomputing_pipelines_are_candidates_where_memory_has_a_limit() -> None:
    assert "Pipeline(2, 4, recompute)" in map(str, candidates(FACTS, 2, recompute=True))


def test_what_gives_one_devices_result_and_is_no_candidate_is_named() -> None:
    assert not_considered(WHOLE, 6) == ["pipelines (It draws)", "5 of 6 devices (too many)"]
    [gpipe, others] = not_considered(FACTS, 4)
    assert gpipe.startswith("gpipe (")
    assert others.startswith("interleaved, micro-batches but 1, 2, 4 a stage, stages of shards, 3 of 4 devices")


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        (ONE, 400 + 400 + 800 + 1000),
        (TWO, 400 + 400 + 800 + 500),
        (Layout(2, shard="optimizer"), 400 + 400 + 400 + 500),
        (Layout(2, shard="weights"), 200 + 200 + 400 + 500),
        (Layout(num_shards=2), 200 + 200 + 400 + 500),
        (Layout(num_stages=2, num_microbatches=4), 200 + 200 + 400 + 1000 / 4 / 1.5),
        (Layout(num_stages=2, num_microbatches=4, recompute=True), 200 + 200 + 400 + 1000 / 4 / 2),
        (Layout(num_stages=4, num_microbatches=4), 200 + 200 + 200 + 1000 / 4 / (25 / 12)),  # one weight is a half
    ],
    ids=str,
)
def test_the_least_memory_is_that_of_the_owners_and_of_the_measured_peak(layout: Layout, num_bytes: float) -> None:
    assert least_bytes(layout, FACTS, 2600) == round(num_bytes)


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (FOUR, TWO),
        (TWO, PIPELINE),
        (PIPELINE, Layout(1, 2, 4)),
        (Layout(1, 2, 8, "zero_bubble"), PIPELINE),
        (PIPELINE, dataclasses.replace(PIPELINE, recompute=True)),
    ],
    ids=str,
)
def test_the_simulator_orders_layouts(fast: Layout, slow: Layout) -> None:
    assert relative_step(fast) < relative_step(slow)


@pytest.mark.parametrize("layout", [Layout(), Layout(4, 1), Layout(2, 2, 4)], ids=str)
def test_a_layout_is_of_the_strategy_that_its_name_says(layout: Layout) -> None:
    assert str(layout).partition("(")[0].lower() == layout.kind.replace("_", "")
