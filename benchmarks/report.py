"""What a run of the benchmarks prints and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table

from benchmarks.harness import Outcome, Result


def machine_table(machine: Mapping[str, Any]) -> rich.table.Table:
    """Return the machine and the versions as a table for `rich.print`."""
    table = rich.table.Table(show_header=False, box=None)
    for name, value in machine.items():
        table.add_row(name.replace("_", " "), str(value))
    return table


def result_table(result: Result) -> rich.table.Table:
    """Return medians, the spread over the rounds and the ratios as a table for `rich.print`.

    Args:
        result: The figures of an experiment.
    """
    experiment = result.experiment
    table = rich.table.Table(
        title=f"{experiment.name}: {experiment.summary}",
        caption="\n".join(_sentence(outcome) for outcome in result.outcomes()),
        caption_justify="left",
    )
    table.add_column("")
    for column in (f"{experiment.figure.replace('_', ' ')}, median", "slowest round", "fastest round"):
        table.add_column(column, justify="right")
    for name, figures in result.figures.items():
        table.add_row(name, *(f"{figure:,.0f}" for figure in (result.median(name), min(figures), max(figures))))
    return table


def _sentence(outcome: Outcome) -> str:
    ratio = f"{outcome.ours} / {outcome.theirs}: {outcome.ratio:.3f}x"
    if not outcome.target.at_least:
        return ratio
    return f"{ratio}, target {outcome.target.at_least:g}x {'met' if outcome.met else 'MISSED'}"


def write_json(path: Path, machine: Mapping[str, Any], experiments: Sequence[Mapping[str, Any]]) -> None:
    """Write what is known so far; called before the first experiment as well, so a bad path shows at once.

    Args:
        path: The file; replaced if it exists.
        machine: From `benchmarks.machine.describe_machine`.
        experiments: One entry an experiment.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(json.dumps({"machine": machine, "experiments": experiments}, indent=2) + "\n", encoding="utf-8")
