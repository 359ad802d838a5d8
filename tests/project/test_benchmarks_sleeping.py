"""The experiment of sleeping layers: its prediction from the sleeps alone, and a tiny grid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.harness import Experiment
from benchmarks.pipelines.sleeping import HYBRID_SLEEPING, WORKERS_SLEEPING, Sleeping, predicted_seconds

GRID = Sleeping(2, (1.0, 1.0), num_examples=16, num_microbatches=4, num_devices=4)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (GRID, (4 + 1) * 3.0),
        (replace(GRID, schedule="gpipe"), (4 + 1) * 3.0),
        (replace(GRID, num_replicas=4, forward_seconds=(1.0,)), 4 * 3.0),
        (replace(GRID, num_replicas=1, forward_seconds=(1.0,) * 4), (4 + 3) * 3.0),
        # Two chunks a device: half the bubble of four stages on four devices, two of three seconds a stage.
        (replace(GRID, forward_seconds=(1.0,) * 4, schedule="interleaved"), (2 * 4 + 1) * 3.0),
        # The second stage takes twice as long, and the first waits for it.
        (replace(GRID, forward_seconds=(1.0, 2.0)), 1.0 + 4 * 6.0 + 2.0),
        # 4.004 MB of each stage over 1 Mbit/s, of which 0.94 are payload, one stage after the other. The sums of the
        # second stage begin two seconds before the last action ends.
        (replace(GRID, num_workers=2, megabits_per_second=1, width=1000), (4 + 1) * 3.0 - 2.0 + 2 * 8 * 4.004 / 0.94),
        # Micro-batches of 2 1 2 1 and 2 1 2 1 rows: one stage, twice 3 s and twice 1.5 s.
        (Sleeping(2, (1.0,), num_examples=12, num_microbatches=4, num_devices=2), 2 * 3.0 + 2 * 1.5),
    ],
)
def test_a_step_is_predicted_from_the_sleeps(setting: Sleeping, expected: float) -> None:
    assert predicted_seconds(setting) == pytest.approx(expected)


@pytest.mark.parametrize("experiment", [HYBRID_SLEEPING, WORKERS_SLEEPING], ids=lambda one: one.name)
def test_the_grids_have_eight_devices_and_two_predictions_each(experiment: Experiment) -> None:
    settings = experiment.settings
    assert {len(setting.order.actions) for setting in settings.values()} == {8}
    outputs = {name: dict.fromkeys(("step_seconds", "predicted_seconds", "printed_seconds"), 2.0) for name in settings}
    assert len(experiment.findings) == 2 * len(settings)
    assert all(math.isclose(finding.of(outputs), 1.0) for finding in experiment.findings)


@pytest.mark.usefixtures("logical_cpus")
def test_a_grid_sleeps_as_long_as_it_is_told() -> None:
    from benchmarks.pipelines.sleeping_worker import measure_grid

    setting = replace(GRID, forward_seconds=(0.01, 0.01), num_microbatches=1, num_steps=1)
    output = measure_grid(setting)
    assert set(output) == {"step_seconds", "printed_seconds"}
    assert output["step_seconds"] >= predicted_seconds(setting)
    assert output["printed_seconds"] > 0.9 * predicted_seconds(setting)  # the cost of an empty action is subtracted
