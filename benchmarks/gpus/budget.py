"""Turns within a budget of seconds: what is measured is kept, and the next run continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.gpus.contenders import NAME, Turn
from benchmarks.gpus.setting import GpuSetting
from benchmarks.gpus.turn import measure
from benchmarks.harness import Experiment, Output, Result, shown
from benchmarks.results import ResultFile

Outputs = dict[GpuSetting, Output]
# TensorFlow takes about half of it to start on a GPU.
LEAST_SECONDS = 30.0


def finished(turns: Sequence[Turn], results: ResultFile) -> Outputs:
    """Return what a file of results holds of some turns.

    Args:
        turns: All settings.
        results: The file.

    Raises:
        ValueError: If the file holds other settings of the same names.
    """
    settings = [setting for turn in turns for setting in turn]
    return {setting: held[setting.name] for setting in settings for held in results.rounds_of(_experiment(setting))}


def run(
    turns: Sequence[Turn],
    budget_seconds: float,
    results: ResultFile,
    report: Callable[[str, Outputs], None] = lambda line, outputs: None,
) -> Outputs:
    """Measure what the file of results does not hold, in the order of the turns, until the budget ends.

    Args:
        turns: All settings.
        budget_seconds: The most that all turns together may take.
        results: Gets the figures of each setting.
        report: Gets a line for each setting as it ends, and the figures so far.

    Returns:
        The figures of each setting that was measured, or why there are none.

    Raises:
        ValueError: As for `finished`.
    """
    deadline = time.monotonic() + budget_seconds
    outputs = finished(turns, results)
    for turn in turns:
        while missing := [setting for setting in turn if setting not in outputs]:
            if time.monotonic() + LEAST_SECONDS > deadline:
                return outputs
            for setting, output in measure(missing, deadline - time.monotonic()):
                outputs[setting] = output
                results.save(Result(_experiment(setting), [{setting.name: output}]))
                report(f"{setting.label}: {', '.join(' '.join(shown(*figure)) for figure in output.items())}", outputs)
    return outputs


def _experiment(setting: GpuSetting) -> Experiment:
    return Experiment(
        f"{NAME}: {setting.label}",
        f"batch {setting.batch_size} on {', '.join(setting.devices)}",
        "step_seconds",
        {setting.name: setting},
        lambda one: dict(measure([one], one.limit_seconds))[one],
        has_rounds=False,
    )
