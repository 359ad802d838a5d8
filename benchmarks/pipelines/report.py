"""What a run of a pipeline experiment prints."""

from __future__ import annotations

import rich.console
import rich.table

from benchmarks.pipelines.harness import Finding, Result, shown


def report_of(result: Result) -> rich.console.Group:
    """Return two tables for `rich.print`: the medians of each setting, and the findings with their targets.

    Args:
        result: The answers of an experiment.
    """
    return rich.console.Group(_settings(result), _findings(result))


def _settings(result: Result) -> rich.table.Table:
    experiment = result.experiment
    table = rich.table.Table(title=f"{experiment.name}: {experiment.summary}")
    # Not every setting has every figure: a dict keeps each once, in the order in which they come.
    figures = dict.fromkeys(figure for answer in result.rounds[0].values() for figure in answer)
    table.add_column("medians of the rounds")
    for figure in figures:
        table.add_column(shown(figure, 0.0)[0], justify="right")
    for name, answer in result.rounds[0].items():
        cells = (shown(figure, result.median(name, figure))[1] if figure in answer else "" for figure in figures)
        table.add_row(name, *cells)
    return table


def _findings(result: Result) -> rich.table.Table:
    table = rich.table.Table()
    for column in ("within each round", "median", "target", ""):
        table.add_column(column, justify="right" if column == "median" else "left")
    for finding in result.experiment.findings:
        target = _target(finding)
        verdict = ("met" if result.met(finding) else "MISSED") if target else ""
        table.add_row(finding.text, f"{result.found(finding):.3f}", target, verdict)
    return table


def _target(finding: Finding) -> str:
    limits = {"at least": finding.at_least, "at most": finding.at_most}
    return ", ".join(f"{word} {limit:.3g}" for word, limit in limits.items() if limit is not None)
