"""The time of a step, by the wall clock and by the processor, compared with others' or with another commit's."""

from __future__ import annotations

import dataclasses

from benchmarks.harness import Experiment, Finding, Output
from benchmarks.measurement import Measurement
from benchmarks.pipelines.figures import ratio
from benchmarks.worker import measure

FIGURE = "step_processor_seconds"


def measure_step(measurement: Measurement) -> Output:
    """Return the wall time and the processor time of a step, which other work on the machine changes less.

    Args:
        measurement: What to train.

    Raises:
        WorkerError: If a process fails.
    """
    output = measure(measurement)
    return {
        "step_seconds": output["training_seconds"] / measurement.num_steps,
        "step_processor_seconds": output["processor_seconds"] / measurement.num_steps,
    }


def speed_ups(theirs: str, ours: str, at_least: float | None = None) -> list[Finding]:
    """Return how many times as fast one setting is as another, in processor time and in wall time.

    Args:
        theirs: The name of a setting.
        ours: The name of another one.
        at_least: The least to reach in processor time; None for no such limit.
    """
    return [
        Finding(f"{theirs} / {ours}, processor time", ratio(theirs, ours, FIGURE), at_least),
        Finding(f"{theirs} / {ours}, wall time", ratio(theirs, ours, "step_seconds")),
    ]


def against(experiment: Experiment, commit: str) -> Experiment:
    """Give each setting of tfpar a second turn with tfpar of another commit.

    Args:
        experiment: Its settings are measurements.
        commit: A hash.

    Raises:
        ValueError: If tfpar does not train in the experiment, or in another way.
    """
    ours = {
        name: setting
        for name, setting in experiment.settings.items()
        if isinstance(setting, Measurement) and setting.trainer == "tfpar"
    }
    if not ours:
        raise ValueError(f"--against has no effect on {experiment.name}: choose an experiment such as two_devices.")
    settings: dict[str, Measurement] = {}
    findings: list[Finding] = []
    for name, measurement in ours.items():
        before = f"{name}, {commit[:8]}"
        settings |= {name: measurement, before: dataclasses.replace(measurement, commit=commit)}
        findings += speed_ups(before, name)
    return Experiment(f"{experiment.name}_against", experiment.summary, FIGURE, settings, measure_step, tuple(findings))
