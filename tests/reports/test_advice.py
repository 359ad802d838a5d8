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


def advice(folder: Path, toml: str = "", **tables: Any) -> list[Advice]:
    lines = recorded.epochs(4, **tables.pop("figures", {}))
    return advise(recorded_run.read(recorded.write(folder / "run", toml, lines, **tables)))


def test_waiting_for_data_gains_at_most_its_share(tmp_path: Path) -> None:
    (found,) = advice(tmp_path)
    assert found.times == pytest.approx(1.25)
    assert (found.flags, found.basis, found.changes_weights) == ("--set data.cache=true", "measured, at most", True)


def test_waiting_with_a_cache_names_no_setting(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, "[data]\ncache = true")
    assert found.flags == ""
    assert found.times == pytest.approx(1.25)


def test_a_run_without_waste_gets_no_advice(tmp_path: Path) -> None:
    assert advice(tmp_path, figures={"data_wait_share": 0.01}) == []


def test_a_bubble_is_simulated_with_the_measured_times(tmp_path: Path) -> None:
    found = advice(tmp_path, PIPELINE, record=recorded.record(seconds={}), figures={"data_wait_share": 0.0})
    # Two equal stages: m (F + B) + F + B for gpipe.
    by_line = {one.flags: one for one in found}
    times = [one.times for one in found]
    assert times == sorted(times, reverse=True)
    assert by_line["--set strategy.num_microbatches=8"].times == pytest.approx(15 / 13.5)
    assert by_line["--set strategy.num_microbatches=16"].times == pytest.approx(15 / 12.75)
    assert {one.basis for one in found} == {"simulated from measured times"}


def test_a_simulation_that_was_wrong_by_more_than_its_gain_advises_nothing(tmp_path: Path) -> None:
    record = recorded.record(seconds={})
    record["pipeline"]["measured"]["step_seconds"] = 0.5 * record["pipeline"]["planned"]["step_seconds"]
    assert advice(tmp_path, PIPELINE, record=record, figures={"data_wait_share": 0.0}) == []


def test_validation_is_advised_less_often_by_its_measured_time(tmp_path: Path) -> None:
    found = advice(tmp_path, record=recorded.record(pipeline=None), figures={"data_wait_share": 0.0})
    assert [(one.flags, round(one.times, 3)) for one in found] == [("--set training.validation_freq=2", 1.176)]


def test_every_line_is_taken_by_the_train_command(tmp_path: Path) -> None:
    found = advice(tmp_path, PIPELINE, record=recorded.record())
    assert len(found) == 4
    for one in found:
        for key in one.settings:
            assert config.closest_key(key.rpartition(".")[2]) is not None
        assert json.dumps(dict(one.settings))
