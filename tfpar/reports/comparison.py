"""The comparison of several runs, as a page and as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tfpar.messages.number_format import duration, figure, memory
from tfpar.reports import page, pictures, templates
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.templates import Table

COLUMNS = 80
MOST_SETTINGS = 200
MOST_LABEL_COLUMNS = 40
ABSENT = "-"


def names(runs: Sequence[RecordedRun]) -> dict[str, RecordedRun]:
    """Return runs by name, or by path where two folders have the same name."""
    folders = [run.name for run in runs]
    return {run.name if folders.count(run.name) == 1 else str(run.folder): run for run in runs}


def differing(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Return the settings that differ, each with its value in every run, or `ABSENT`.

    Example:
        >>> runs = [RecordedRun(None, {"seed": seed}, (), {}, (), "", {}) for seed in (1, 2)]
        >>> differing(runs)
        {'seed': [1, 2]}
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = {key: [run.settings.get(key, ABSENT) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(map(repr, values))) > 1}


def figures(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """Return the state, layout, metrics, speed and memory of all runs, by name of the figure."""
    rows: dict[str, list[str]] = {"state": [run.status for run in runs]}
    rows["layout"] = [_layout(run) for run in runs]
    rows["epochs"] = [_number(run.figures.get("epochs", run.figures.get("epoch"))) for run in runs]
    for name in pictures.metric_names(*runs):
        rows |= {log: [_number(run.figures.get(log)) for run in runs] for log in (name, f"val_{name}")}
    rows["step"] = [ABSENT if run.step_seconds is None else duration(run.step_seconds) for run in runs]
    rows["examples/s"] = [_number(run.figures.get("examples_per_second")) for run in runs]
    rows["waiting for data"] = [_percent(run.figures.get("data_wait_share")) for run in runs]
    rows["peak of the fullest device"] = [_memory(run.fullest_bytes) for run in runs]
    rows["peak of the process"] = [_memory(run.process_bytes) for run in runs]
    return {name: cells for name, cells in rows.items() if set(cells) != {ABSENT}}


def _layout(run: RecordedRun) -> str:
    """Return the recorded layout of a run, which the planner may have chosen."""
    layout = run.table("layout").get("strategy")
    return layout if isinstance(layout, str) and layout else ABSENT


def _number(value: Any) -> str:
    return figure(value) if is_number(value) else ABSENT


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %" if is_number(value) else ABSENT


def _memory(value: Any) -> str:
    return memory(value) if is_number(value) else ABSENT


def comparison(runs: Sequence[RecordedRun]) -> str:
    """Return the comparison as a self-contained HTML page.

    Args:
        runs: At least two runs, of different folders.
    """
    named, settings = names(runs), differing(runs)
    rows: list[tuple[str, ...]] = [(name, *cells) for name, cells in figures(runs).items()]
    rows += [
        (key, *(value if value == ABSENT else page.show(value) for value in values))
        for key, values in list(settings.items())[:MOST_SETTINGS]
    ]
    heads = ["figure or setting", *named]
    notes = [f"{name}: {note}" for name, run in named.items() for note in run.notes]
    notes += [f"{name} is still training." for name, run in named.items() if run.status == "training"]
    return templates.render(
        "comparison.html",
        title=f"Comparison of {len(runs)} runs",
        folders=", ".join(str(run.folder) for run in runs),
        notes=notes,
        pictures=pictures.compared(named),
        figures_and_settings=Table("Final figures, and settings that differ", heads, rows, False),
        differing="" if settings else "All settings are equal.",
    )


def text(runs: Sequence[RecordedRun]) -> str:
    """Return the comparison as text of 80 columns: a block of settings and figures for each run."""
    named = names(runs)
    settings, rows = differing(runs), figures(runs)
    columns = 4 + min(MOST_LABEL_COLUMNS, max(map(len, [*settings, *rows])))
    lines = []
    for number, name in enumerate(named):
        lines += textwrap.wrap(page.shown(name), COLUMNS) or [ABSENT]
        cells = {key: values[number] for key, values in settings.items()}
        cells = {key: value if value == ABSENT else page.show(value) for key, value in cells.items()}
        cells |= {key: values[number] for key, values in rows.items()}
        for key, value in cells.items():
            lines += _line(key, value, columns) if value != ABSENT else []
        lines.append("")
    lines += textwrap.wrap(
        f"Settings that differ come first, {len(settings)}; a run without a line lacks that setting."
        if settings
        else "All settings are equal.",
        COLUMNS,
    )
    return "\n".join(lines)


def _line(label: str, value: str, columns: int) -> list[str]:
    name = f"  {page.shown(label)}"
    begin = f"{name:{columns}}" if len(name) < columns else f"{name} "
    return textwrap.wrap(
        page.shown(value), COLUMNS, initial_indent=begin, subsequent_indent=" " * min(columns, 30)
    ) or [begin.rstrip()]
