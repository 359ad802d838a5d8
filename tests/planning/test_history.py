"""How well earlier runs were predicted, from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfpar.planning.history import has_equal_devices, history
from tfpar.planning.ranking import UNTESTED

MACHINE = "node1, 2 cores, CPU"


def write(folder: Path, name: str, content: Any) -> None:
    run = folder / name
    run.mkdir()
    (run / "prediction.json").write_text(content if isinstance(content, str) else json.dumps(content))


def record(time_error: float, memory_error: float | None = None, machine: str = MACHINE) -> dict[str, Any]:
    return {
        "layout": "SingleDevice",
        "planned_step_seconds": 0.2 * (1 + time_error),
        "measured_step_seconds": 0.2,
        "planned_memory_bytes": None if memory_error is None else 1000 * (1 + memory_error),
        "measured_memory_bytes": 1000,
        "machine": machine,
    }


def test_median_and_worst_error_of_time_and_the_range_of_memory_are_quoted(tmp_path: Path) -> None:
    for number, errors in enumerate([(0.04, -0.01), (-0.07, 0.06), (0.02, None)]):
        write(tmp_path, f"run{number}", record(*errors))
    expected = "error of the prediction in 3 runs of this machine: time 4 % (worst 7 %), memory -1 % to +6 %"
    assert history(tmp_path, MACHINE) == expected


def test_runs_of_other_machines_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "here", record(0.01))
    write(tmp_path, "there", record(0.5, machine="node2, 2 cores, CPU"))
    assert history(tmp_path, MACHINE) == "error of the prediction in 1 run of this machine: time 1 % (worst 1 %)"


def test_the_previewed_step_of_a_pipeline_is_none_of_the_planner(tmp_path: Path) -> None:
    write(tmp_path, "planned", record(0.01) | {"previewed_step_seconds": 0.05})
    write(tmp_path, "previewed", record(0.0) | {"planned_step_seconds": None, "previewed_step_seconds": 0.05})
    assert history(tmp_path, MACHINE) == "error of the prediction in 1 run of this machine: time 1 % (worst 1 %)"


def test_without_a_tested_prediction_that_is_said(tmp_path: Path) -> None:
    write(tmp_path, "unplanned", record(0.0) | {"planned_step_seconds": None})
    (tmp_path / "a_file").touch()
    (tmp_path / "no_prediction").mkdir()
    assert history(tmp_path, MACHINE) == UNTESTED
    assert history(tmp_path / "missing", MACHINE) == UNTESTED


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "[" * 100_000, "x" * 100_000,
        record(0.0) | {"planned_step_seconds": "0.2"}, record(0.0) | {"measured_step_seconds": 0},
        record(0.0) | {"planned_step_seconds": float("inf")}, record(0.0) | {"planned_step_seconds": True},
        record(0.0) | {"measured_step_seconds": -1.0}, {"machine": MACHINE},
    ],
)  # fmt: skip
def test_files_that_hold_something_else_are_left_out(content: Any, tmp_path: Path) -> None:
    write(tmp_path, "damaged", content)
    write(tmp_path, "whole", record(0.03))
    assert history(tmp_path, MACHINE) == "error of the prediction in 1 run of this machine: time 3 % (worst 3 %)"


@pytest.mark.parametrize(
    ("kind", "num_planned", "num_used", "is_equal"),
    [
        ("CPU", 2, 2, True), ("CPU", 2, 1, False), ("CPU", 1, 1, True), ("CPU", 4, 2, False), ("CPU", 16, 32, True),
        ("GPU", 2, 1, True),
    ],
)  # fmt: skip
def test_logical_cpus_are_compared_only_with_those_of_as_many_cores(
    kind: str, num_planned: int, num_used: int, is_equal: bool
) -> None:
    assert has_equal_devices(kind, num_planned, num_used, num_cores=8) == is_equal
