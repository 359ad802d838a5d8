"""The order of predicted layouts, and what a plan says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tfpar.planning.costs import BlockCost, Curve, Line, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, Refusal, never_tried
from tfpar.planning.plan import Plan
from tfpar.planning.ranking import rank, settings_of
from tfpar.planning.rows import PredictedStep

GB = 10**9
ONE, TWO, FOUR = Layout(), Layout(2), Layout(4)
SHARDED = Layout(4, shard="optimizer")
BLOCKS = tuple(BlockCost(f"dense_{number}", Line(), Line(), 4, 4, is_divided=True) for number in range(5))
MODEL = ModelCosts("mlp", 100, 400, 400, 800, (400,), 64, Curve((64,), (0.7,)), 0.01, blocks=BLOCKS, spread=0.02)
GPUS = MachineCosts("GPU", 4, 4)


def step(layout: Layout, seconds: float, gigabytes: float = 1.0, largest_batch: int | None = None) -> PredictedStep:
    return PredictedStep(layout, seconds, {"bubble": 0.0}, round(gigabytes * GB), largest_batch)


def with_memory(gigabytes: float) -> MachineCosts:
    return dataclasses.replace(GPUS, memory_bytes=round(gigabytes * GB))


def planned(steps: Sequence[PredictedStep], machine: MachineCosts = GPUS, **settings: object) -> Plan:
    return rank(steps, [], MODEL, machine, **settings)  # type: ignore[arg-type]


def ranks(plan: Plan) -> list[tuple[int | None, str]]:
    return [(row.rank, str(row.layout)) for row in plan.rows]


def test_the_fastest_that_fits_comes_first_and_what_does_not_fit_last() -> None:
    steps = [step(ONE, 0.7, 51), step(TWO, 0.35, 26), step(SHARDED, 0.21, 14.1), step(FOUR, 0.20, 42)]
    plan = planned(steps, with_memory(40))
    assert ranks(plan) == [
        (1, 'Mirrored(4, shard="optimizer")'),
        (2, "Mirrored(2)"),
        (None, "Mirrored(4)"),
        (None, "SingleDevice"),
    ]
    assert plan.taken is plan.rows[0]
    assert [row.fits for row in plan.rows] == [True, True, False, False]


def test_speed_is_relative_to_one_device_also_where_that_does_not_fit() -> None:
    plan = planned([step(ONE, 0.8, 51), step(FOUR, 0.2, 14)], with_memory(40))
    assert [row.times_one for row in plan.rows] == pytest.approx([4.0, 1.0])
    assert plan.rows[0].examples_per_second == pytest.approx(320)


def test_without_a_prediction_for_one_device_no_row_has_a_speed_relative_to_it() -> None:
    assert planned([step(FOUR, 0.2)]).rows[0].times_one is None


def test_what_does_not_fit_says_what_it_lacks_and_which_batch_fits() -> None:
    plan = planned([step(ONE, 0.7, 51, largest_batch=48), step(TWO, 0.4, 45), step(FOUR, 0.2, 20)], with_memory(40))
    assert [row.lacks for row in plan.rows] == [
        "",
        "lacks 5.00 GB on a device; no batch fits",
        "lacks 11.0 GB on a device; fits at batch 48",
    ]


def test_of_the_pipelines_of_a_grid_only_the_fastest_that_fits_is_a_row() -> None:
    few, many = Layout(num_stages=4, num_microbatches=4), Layout(num_stages=4, num_microbatches=16)
    recomputed = dataclasses.replace(many, recompute=True)
    steps = [step(few, 0.3, 20), step(many, 0.2, 15), step(recomputed, 0.25, 8)]
    assert ranks(planned(steps, with_memory(40))) == [(1, "Pipeline(4, 16)")]
    assert ranks(planned(steps, with_memory(10))) == [(1, "Pipeline(4, 16, recompute)")]
    assert ranks(planned(steps, with_memory(5))) == [(None, "Pipeline(4, 16, recompute)")]


def test_rows_within_the_spread_are_equal_and_the_simplest_is_first() -> None:
    hybrid = Layout(2, num_stages=2, num_microbatches=8)
    steps = [step(hybrid, 0.200), step(SHARDED, 0.202), step(FOUR, 0.203), step(TWO, 0.21), step(ONE, 0.213)]
    plan = planned(steps)
    assert ranks(plan) == [
        (1, "Mirrored(4)"),
        (1, 'Mirrored(4, shard="optimizer")'),
        (1, "Hybrid(2 x Pipeline(2, 8))"),
        (4, "SingleDevice"),
        (4, "Mirrored(2)"),
    ]
    assert "Rows of the same rank are equal" in plan.notes[0]


def test_equality_is_measured_from_the_fastest_of_a_group_so_that_it_does_not_chain() -> None:
    plan = planned([step(ONE, 0.2079), step(TWO, 0.2039), step(FOUR, 0.2)])
    assert ranks(plan) == [(1, "Mirrored(2)"), (1, "Mirrored(4)"), (3, "SingleDevice")]


def test_a_noisy_measurement_ranks_nothing_and_says_so() -> None:
    plan = rank([step(ONE, 0.7), step(FOUR, 0.2)], [], dataclasses.replace(MODEL, spread=0.6), GPUS)
    assert ranks(plan) == [(None, "SingleDevice"), (None, "Mirrored(4)")]
    assert plan.taken is None
    assert "vary by 60 %" in plan.notes[0]


def test_if_no_layout_fits_the_nearest_is_named_with_what_it_lacks() -> None:
    plan = planned([step(ONE, 0.7, 51), step(FOUR, 0.2, 20), step(SHARDED, 0.2, 12.5)], with_memory(12))
    assert plan.taken is None
    assert plan.rows[0].layout == SHARDED
    assert plan.notes[0].startswith("No layout fits in the 12.0 GB of a device. The nearest is Mirrored(4, shard=")
    assert "lacks 500 MB" in plan.notes[0]


def test_one_device_more_is_compared_with_the_best_row() -> None:
    assert "A fifth device would bring 1.2x." in planned([step(FOUR, 0.24)], more=[step(Layout(5), 0.2)]).notes
    assert "A fifth device would bring nothing." in planned([step(FOUR, 0.24)], more=[step(FOUR, 0.24)]).notes


def test_with_one_device_there_is_one_row_and_what_a_second_would_bring() -> None:
    plan = planned([step(ONE, 0.4)], MachineCosts("GPU", 1, 1), more=[step(ONE, 0.4), step(TWO, 0.22)])
    assert ranks(plan) == [(1, "SingleDevice")]
    assert plan.notes == ("A second device would bring 1.8x.",)


def test_one_device_more_brings_nothing_if_only_layouts_that_do_not_fit_are_faster() -> None:
    plan = planned([step(FOUR, 0.24, 5)], with_memory(10), more=[step(FOUR, 0.24, 5), step(Layout(5), 0.2, 20)])
    assert plan.notes == ("A fifth device would bring nothing.",)


def test_what_is_not_considered_is_grouped_by_reason_without_microbatches() -> None:
    refusals = [
        Refusal(Layout(num_stages=8, num_microbatches=8), "5 blocks"),
        Refusal(Layout(num_stages=8, num_microbatches=16), "5 blocks"),
        Refusal(Layout(2, num_stages=6, num_microbatches=6), "5 blocks"),
        Refusal(Layout(8), "the batch has 4 examples"),
    ]
    plan = rank([step(ONE, 1.0)], refusals, MODEL, GPUS)
    assert plan.not_considered[:2] == (
        "Pipeline(8), Hybrid(2 x Pipeline(6)) (5 blocks)",
        "Mirrored(8) (the batch has 4 examples)",
    )


def test_what_is_never_a_candidate_is_named_with_the_reason() -> None:
    """Of five blocks that tensor parallelism divides, on four GPUs."""
    plan = rank([step(ONE, 1.0)], [], MODEL, GPUS)
    assert plan.not_considered == (
        "gpipe (1f1b is as fast, with less memory)",
        "interleaved, Pipeline(num_shards=n) (not predicted)",
        "micro-batches but 1, 2, 4, 8 a stage, 3 of 4 devices (too many to compare)",
    )
    words = str(plan).partition("Not considered: ")[2].splitlines()
    assert len(words) == 3
    assert max(map(len, words)) <= 80


def test_several_hosts_name_what_is_not_considered_over_them() -> None:
    machine = dataclasses.replace(GPUS, num_devices=2, num_hosts=3)
    whole = dataclasses.replace(MODEL, blocks=tuple(dataclasses.replace(one, is_divided=False) for one in BLOCKS))
    plan = rank([step(TWO, 1.0)], [], whole, machine)
    assert plan.not_considered == (
        "gpipe (1f1b is as fast, with less memory)",
        "interleaved, Hybrid(across_workers) (not predicted)",
        "micro-batches but 1, 2, 4, 8 a stage (too many to compare)",
        "TensorParallel (no layer that it divides)",
    )


def test_a_pipeline_over_hosts_of_one_device_has_other_schedules_and_micro_batches_too() -> None:
    plan = rank([step(TWO, 1.0)], [], MODEL, dataclasses.replace(GPUS, num_devices=1, num_hosts=2))
    assert plan.not_considered == (
        "gpipe (1f1b is as fast, with less memory)",
        "interleaved (not predicted)",
        "micro-batches but 1, 2, 4, 8 a stage (too many to compare)",
    )


def test_one_device_leaves_nothing_out() -> None:
    assert rank([step(ONE, 1.0)], [], MODEL, MachineCosts("GPU", 1, 1)).not_considered == ()


def test_a_model_that_cannot_be_cut_says_why_and_the_others_are_ranked() -> None:
    uncut = dataclasses.replace(MODEL, blocks=(), uncut="Its call is Python code, not a graph of layers.")
    plan = rank([step(ONE, 1.0), step(TWO, 0.5)], [], uncut, GPUS)
    assert plan.not_considered == (
        "pipelines (Its call is Python code, not a graph of layers)",
        "3 of 4 devices (too many to compare)",
        "TensorParallel (not predicted for a model that cannot be cut)",
    )
    assert plan.rows[0].layout == TWO


def test_stated_values_and_planned_devices_are_marked() -> None:
    machine = dataclasses.replace(GPUS, num_devices=8, num_measured=1, assumed=("memory 24.0 GB", "bandwidth 10 GB/s"))
    assert planned([step(ONE, 1.0)], machine).notes == (
        "Planned for 8 devices of each host, from 1 measured device.",
        "Stated, not measured: memory 24.0 GB, bandwidth 10 GB/s.",
    )


def test_logical_cpus_are_not_taken_for_more_machines() -> None:
    notes = planned([step(ONE, 1.0)], MachineCosts("CPU", 2, 2)).notes
    assert any(note.startswith("Logical CPUs share the cores") for note in notes)


@pytest.mark.parametrize(
    ("layout", "machine", "settings"),
    [
        (ONE, MachineCosts("CPU", 2, 2), {"kind": "single_device"}),
        (TWO, MachineCosts("CPU", 4, 4), {"kind": "mirrored", "num_logical_cpus": 2}),
        (TWO, GPUS, {"kind": "mirrored", "devices": ["GPU:0", "GPU:1"]}),
        (FOUR, GPUS, {"kind": "mirrored"}),
        (Layout(num_stages=2, num_microbatches=4), GPUS, {"kind": "pipeline", "num_stages": 2, "num_microbatches": 4}),
        (Layout(8, num_hosts=2), GPUS, {"kind": "multi_worker"}),
        (
            Layout(4, num_shards=2, num_hosts=2),
            GPUS,
            {"kind": "tensor_parallel", "num_shards": 2, "num_replicas": 2},
        ),
    ],
)
def test_settings_name_the_devices_that_a_layout_needs(
    layout: Layout, machine: MachineCosts, settings: dict[str, object]
) -> None:
    assert settings_of(layout, machine) == settings


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one predicted layout"):
        planned([])


def test_a_plan_in_which_nothing_fits_does_not_ask_for_a_quiet_machine() -> None:
    noisy = dataclasses.replace(MODEL, spread=0.9)
    notes = " ".join(rank([step(ONE, 0.7, 51)], [], noisy, with_memory(40)).notes)
    assert "No layout fits in the 40.0 GB of a device." in notes
    assert "too noisy" not in notes


def test_layouts_across_hosts_of_one_device_have_others_that_are_not_tried() -> None:
    assert next(never_tried(1, 2, num_blocks=4, divides_layers=False)).startswith("gpipe (")
