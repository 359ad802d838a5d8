"""The phases of a step on several workers: the chief's report has the replicas of all."""

from pathlib import Path

import pytest

from tests.support import faults
from tests.support.command import settings
from tests.support.faults import FLAGS, launch
from tfpar.reports import recorded_run

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


def test_the_report_of_a_traced_job_has_the_phases_of_all_workers(tmp_path: Path) -> None:
    words = settings("strategy.kind=multi_worker", "strategy.num_logical_cpus=2", "callbacks.report=true")
    outcome = faults.run([*launch(2), *FLAGS, *words, "--trace"], tmp_path)
    assert outcome.code == 0, outcome
    assert outcome.out.count("phases ") == 1, "the chief alone"
    phases = recorded_run.read(tmp_path / "run").phases
    assert phases is not None
    assert phases.names == ("forward", "backward", "all-reduce", "update")
    assert len(phases.moments) == 4, "two workers with two devices each"
    assert len({row[1:] for row in phases.moments}) == 4, "each measured by its own"
    assert all(0 < row[-1] < 1 for row in phases.moments)
