"""What would make a run faster: gains from figures of the run alone, the largest first, with settings that exist."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import recorded
from tfpar import config
from tfpar.reports import recorded_run
from tfpar.reports.advice import Advice, advise

PIPELINE = '[strategy]\nkind = "pipeline"\nnum_stages = 2\nnum_microbatches = 4\nschedule = "gpipe"'
PLAN = {
    "rows": [
        {"layout": "Mirrored(2)", "step_seconds": 0.005, "fits": True, "settings": {"kind": "mirrored"}},
        {"layout": "Mirrored(4)", "step_seconds": 0.002, "fits": False, "settings": {"kind": "mirrored"}},
        {"layout": "SingleDevice", "step_seconds": 0.02, "fits": True, "settings": {"kind": "single_device"}},
    ]
}


def advice(folder: Path, toml: str = "", **tables: Any) -> list[Advice]:
    lines = recorded.epochs(4, **tables.pop("figures", {}))
    return advise(recorded_run.read(recorded.write(folder / "run", toml, lines, **tables)))


def test_waiting_for_data_gains_at_most_its_share(tmp_path: Path) -> None:
    (found,) = advice(tmp_path)
    assert found.times == pytest.approx(1.25)
    assert (found.line, found.basis, found.another_run) == ("--set data.cache=true", "measured, at most", True)


def test_waiting_with_a_cache_names_no_setting(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, "[data]\ncache = true")
    assert found.line == ""
    assert found.times == pytest.approx(1.25)


def test_a_run_without_waste_gets_no_advice(tmp_path: Path) -> None:
    assert advice(tmp_path, figures={"data_wait_share": 0.01}) == []


def test_a_bubble_is_simulated_with_the_measured_times(tmp_path: Path) -> None:
    found = advice(tmp_path, PIPELINE, record=recorded.record(seconds={}), figures={"data_wait_share": 0.0})
    # Two equal stages: m (F + B) + F + B for gpipe; zero bubble fills most of it.
    by_line = {one.line: one for one in found}
    times = [one.times for one in found]
    assert times == sorted(times, reverse=True)
    assert by_line["--set strategy.num_microbatches=8"].times == pytest.approx(15 / 13.5)
    assert by_line["--set strategy.num_microbatches=16"].times == pytest.approx(15 / 12.75)
    assert by_line["""--set 'strategy.schedule="zero_bubble"'"""].times > 1.1
    assert {one.basis for one in found} == {"simulated from measured times"}


def test_a_simulation_that_was_wrong_by_more_than_its_gain_advises_nothing(tmp_path: Path) -> None:
    record = recorded.record(seconds={})
    record["pipeline"]["measured"]["step_seconds"] = 0.5 * record["pipeline"]["planned"]["step_seconds"]
    assert advice(tmp_path, PIPELINE, record=record, figures={"data_wait_share": 0.0}) == []


def test_a_faster_layout_of_the_plan_is_advised_unless_it_does_not_fit(tmp_path: Path) -> None:
    toml = '[strategy]\nkind = "single_device"'
    (found,) = advice(tmp_path, toml, plan=PLAN, figures={"data_wait_share": 0.0})
    assert found.times == pytest.approx(4)
    assert found.line == """--set 'strategy.kind="mirrored"'"""
    assert found.basis == "predicted"
    assert "20.0 ms predicted" in found.what


@pytest.mark.parametrize(("first", "second", "number"), [(1, 2, 1), (1, 1, 0), (None, None, 0)])
def test_a_layout_is_advised_only_where_the_plan_ranks_it_before_that_of_the_run(
    first: int | None, second: int | None, number: int, tmp_path: Path
) -> None:
    rows = [{**PLAN["rows"][0], "rank": first}, {**PLAN["rows"][2], "rank": second}]
    prediction = {"layout": "SingleDevice"}
    found = advice(tmp_path, plan={"rows": rows}, prediction=prediction, figures={"data_wait_share": 0.0})
    assert len(found) == number


def test_a_plan_without_the_layout_of_the_run_is_compared_with_the_measured_step(tmp_path: Path) -> None:
    plan = {"rows": PLAN["rows"][:2]}
    (found,) = advice(tmp_path, plan=plan, figures={"data_wait_share": 0.0})
    assert found.times == pytest.approx(2)
    assert "10.0 ms measured" in found.what


def test_validation_is_advised_less_often_by_its_measured_time(tmp_path: Path) -> None:
    found = advice(tmp_path, record=recorded.record(pipeline=None), figures={"data_wait_share": 0.0})
    assert [(one.line, round(one.times, 3)) for one in found] == [("--set training.validation_freq=2", 1.176)]


def test_short_calls_are_advised_last_without_a_figure(tmp_path: Path) -> None:
    found = advice(tmp_path, "[training]\nsteps_per_call = 1")
    assert (found[-1].times, found[-1].line) == (None, """--set 'training.steps_per_call="auto"'""")
    assert not found[-1].another_run


def test_every_line_is_taken_by_the_train_command(tmp_path: Path) -> None:
    found = advice(tmp_path, PIPELINE, record=recorded.record(), plan=PLAN)
    assert len(found) >= 5
    for one in found:
        for key in one.settings:
            assert config.closest_key(key.rpartition(".")[2]) is not None
        assert json.dumps(dict(one.settings))


def test_a_layout_that_the_planner_measured_counts_with_its_measured_step(tmp_path: Path) -> None:
    mirrored, _, single = PLAN["rows"]
    rows = [mirrored | {"measured_seconds": 0.008}, single | {"measured_seconds": 0.01}]
    (found,) = advice(tmp_path, plan={"rows": rows}, figures={"data_wait_share": 0.0})
    assert (found.times, found.basis) == (pytest.approx(1.25), "measured")
    assert "Mirrored(2): measured step 8.00 ms, against 10.0 ms measured" in found.what


@pytest.mark.parametrize("rows", [None, 3, [None], [{"step_seconds": "x"}], [{"layout": 1, "step_seconds": 0.001}]])
def test_a_plan_of_another_shape_gives_no_advice(rows: object, tmp_path: Path) -> None:
    assert advice(tmp_path, plan={"rows": rows}, figures={"data_wait_share": float("nan")}) == []
