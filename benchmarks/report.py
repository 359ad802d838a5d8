"""What a run of the benchmarks prints."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.table

from benchmarks import all_reduce, parity_table
from benchmarks.harness import Finding, Result, is_number, shown
from benchmarks.scaling import layouts

_PREDICTED = "predicted "
_MOST_SECONDS = 1e4


def machine_table(machine: Mapping[str, Any]) -> rich.table.Table:
    """Return the machine and the versions as a table for `rich.print`."""
    table = rich.table.Table(show_header=False, box=None)
    for name, value in machine.items():
        table.add_row(name.replace("_", " "), str(value))
    return table


def print_result(result: Result, console: rich.console.Console) -> None:
    """Print the medians of each setting, and the findings with their targets.

    Args:
        result: The outputs of an experiment.
        console: Where to print.
    """
    if result.experiment.name == parity_table.NAME:
        print(parity_table.as_markdown(result))  # not through rich, which would break the lines
    elif result.experiment.name == layouts.NAME:
        print(*layouts.as_markdown(result), sep="\n\n")
    elif result.experiment.name == all_reduce.NAME:
        console.print(all_reduce.table_of(result))
    else:
        console.print(_settings(result))
    if _predicted(result):
        console.print(_predictions(result))
    if result.findings:
        console.print(_findings(result))


def _settings(result: Result) -> rich.table.Table:
    experiment, first = result.experiment, result.rounds[0]
    table = rich.table.Table(title=f"{experiment.name}: {experiment.summary}")
    # Not every setting has every figure: a dict keeps each once, in the order in which they come.
    figures = dict.fromkeys(figure for output in first.values() for figure, value in output.items() if is_number(value))
    layouts_of = tuple(f" {layout}" for layout in dict.fromkeys(layout for _, layout in _predicted(result)))
    figures = {figure: None for figure in figures if not figure.endswith(layouts_of)} if layouts_of else figures
    table.add_column("medians of the rounds")
    for figure in figures:
        title = shown(figure, 0.0)[0]
        for column in (title, "lowest", "highest") if figure == experiment.figure else (title,):
            table.add_column(column, justify="right")
    for name in first:
        table.add_row(name, *(cell for figure in figures for cell in _cells(result, name, figure)))
    return table


def _cells(result: Result, name: str, figure: str) -> list[str]:
    """Return the median of a figure, and for the figure of the experiment its lowest and highest round."""
    is_compared = figure == result.experiment.figure
    if figure not in result.rounds[0][name]:
        return ["", "", ""] if is_compared else [""]
    values = result.figures(name, figure)
    numbers = [result.median(name, figure), min(values), max(values)] if is_compared else [result.median(name, figure)]
    return [shown(figure, number)[1] for number in numbers]


def _predicted(result: Result) -> list[tuple[str, str]]:
    """Return each setting and layout of which a figure was predicted."""
    found = ((name, figure) for name, output in result.rounds[0].items() for figure in output)
    return [(name, figure.removeprefix(_PREDICTED)) for name, figure in found if figure.startswith(_PREDICTED)]


def _predictions(result: Result) -> rich.table.Table:
    """Return a row for each layout: what was predicted, and it relative to each figure that was measured."""
    rows = _predicted(result)
    setting, layout = rows[0]
    kinds = [figure.removesuffix(f" {layout}") for figure in result.rounds[0][setting] if figure.endswith(f" {layout}")]
    measured = [kind for kind in kinds if f"{kind} " != _PREDICTED]
    table = rich.table.Table(title="Predictions and measurements, with predicted / measured")
    table.add_column("medians of the rounds")
    for column in ("predicted", *(column for kind in measured for column in (kind, "ratio"))):
        table.add_column(column, justify="right", no_wrap=True)
    for name, of_setting in itertools.groupby(rows, key=operator.itemgetter(0)):
        table.add_section()
        table.add_row(name, style="bold")
        for _, layout in of_setting:
            predicted = result.median(name, f"{_PREDICTED}{layout}")
            cells = [_quantity(predicted)]
            for kind in measured:
                value = result.median(name, f"{kind} {layout}")
                cells += [_quantity(value), f"{predicted / value:.2f}" if value else ""]
            table.add_row(f"  {layout}", *cells)
    return table


def _quantity(value: float) -> str:
    """Return seconds in ms, and bytes, of which there are more, in MB."""
    return f"{1e3 * value:,.4g} ms" if value < _MOST_SECONDS else f"{value / 1e6:,.1f} MB"


def _findings(result: Result) -> rich.table.Table:
    table = rich.table.Table()
    for column in ("within each round", "median", "target", ""):
        table.add_column(column, justify="right" if column == "median" else "left")
    for finding in result.findings:
        target = _target(finding)
        verdict = ("met" if result.met(finding) else "MISSED") if target else ""
        table.add_row(finding.text, f"{result.found(finding):.3f}", target, verdict)
    return table


def _target(finding: Finding) -> str:
    limits = {"at least": finding.at_least, "at most": finding.at_most}
    return ", ".join(f"{word} {limit:.3g}" for word, limit in limits.items() if limit is not None)
