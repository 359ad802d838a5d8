"""The pictures of a report as PNG images, readable in grey and without colour vision. No TensorFlow.

Lines differ in style and marker, bars in hatches: colour is never alone. Matplotlib is imported on first use.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.pipeline.analysis import timeline_plot
from tfpar.reports import phases_plot
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.step_phases import StepPhases
from tfpar.reports.timelines import MOST_SPANS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour-blind safe palette of Okabe and Ito, from dark to light.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
_LINES = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "X")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
_DPI = 110
_WIDTH_INCHES, _PANEL_INCHES, _BAR_INCHES = 8.4, 2.5, 0.34
MOST_METRICS, MOST_BARS, MOST_MARKERS = 8, 24, 40
_FIGURES = ("epoch", "step", "examples_per_second", "step_milliseconds", "data_wait_share")

Series = tuple[str, Sequence[float], Sequence[float]]


def metric_names(*runs: RecordedRun) -> list[str]:
    """Return the logged names of one number each, the loss first, without `val_` and without figures of the speed.

    Args:
        runs: Recorded runs.
    """
    names: dict[str, None] = {}
    for entry in (entry for run in runs for entry in run.epochs):
        names |= {name.removeprefix("val_"): None for name, value in entry.items() if is_number(value)}
    return sorted((name for name in names if name not in _FIGURES), key=lambda name: name != "loss")


def metrics(run: RecordedRun) -> bytes | None:
    """Return the curves of loss and metrics by epoch, of training and validation.

    Args:
        run: A recorded run.

    Returns:
        A PNG image; None without an epoch.
    """
    panels: dict[str, list[Series]] = {}
    for name in metric_names(run)[:MOST_METRICS]:
        curves = [("training", *curve(run, name)), ("validation", *curve(run, f"val_{name}"))]
        panels[name] = [one for one in curves if one[1]]
    return _curves(panels, "epoch") if panels else None


def curve(run: RecordedRun, name: str) -> tuple[list[float], list[float]]:
    """Return the epochs with a finite value of a log, and the values.

    Args:
        run: A recorded run.
        name: The name of the log.
    """
    points = [(entry["epoch"], entry.get(name)) for entry in run.epochs]
    found = [(epoch, float(value)) for epoch, value in points if is_number(value) and math.isfinite(value)]
    return [epoch for epoch, _ in found], [value for _, value in found]


def speed(run: RecordedRun) -> bytes | None:
    """Return the speed and the share of waiting for data over the steps, by epoch and within epochs.

    Args:
        run: A recorded run.

    Returns:
        A PNG image; None without a figure.
    """
    wanted = (("examples_per_second", "examples/s", 1.0), ("data_wait_share", "waiting for data, %", 100.0))
    panels: dict[str, list[Series]] = {}
    for name, label, scale in wanted:
        lines: list[Series] = []
        for title, entries in (("epoch", run.epochs), ("calls of the last process", run.rows("points"))):
            points = [(one["step"], scale * one[name]) for one in entries if _has(one, "step", name)]
            lines += [(title, [step for step, _ in points], [value for _, value in points])] if points else []
        panels |= {label: lines} if lines else {}
    return _curves(panels, "step", least_zero=True) if panels else None


def _has(entry: Mapping[str, Any], *names: str) -> bool:
    return all(is_number(entry.get(name)) and math.isfinite(entry[name]) for name in names)


def compared(runs: Mapping[str, RecordedRun]) -> bytes | None:
    """Return the loss curves of several runs over one another, of training and, if there is one, of validation.

    Args:
        runs: Recorded runs by their names.

    Returns:
        A PNG image; None without an epoch.
    """
    panels = {
        title: [(name, *curve(run, log)) for name, run in runs.items()]
        for title, log in (("loss", "loss"), ("validation loss", "val_loss"))
    }
    shown = {title: [one for one in lines if one[1]] for title, lines in panels.items()}
    shown = {title: lines for title, lines in shown.items() if lines}
    return _curves(shown, "epoch") if shown else None


def timeline(run: RecordedRun, planned: StepPhases | None) -> bytes | None:
    """Return the timeline of a step as planned, and below as run: all stages of all replicas.

    Args:
        run: A recorded run.
        planned: Without a pipeline, the phases as planned; None for the measured ones alone.

    Returns:
        A PNG image; None for a run without a recorded step, or with too many actions to see one.
    """
    record = run.pipeline
    if record is None and run.phases is not None:
        return _png(phases_plot.figure(planned, run.phases))
    if record is None or len(record.planned.spans) > MOST_SPANS:
        return None
    return _png(timeline_plot.figure(record.planned, record.measured, record.schedule))


def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> bytes | None:
    """Return horizontal bars, one for each row and kind.

    Args:
        title: What the bars show.
        groups: For each kind of bar, such as "predicted", the values by the name of the row.
        unit: The unit of the values.

    Returns:
        A PNG image; None without a value.
    """
    groups = {kind: {name: one for name, one in of.items() if math.isfinite(one)} for kind, of in groups.items()}
    names = list(dict.fromkeys(name for values in groups.values() for name in values))[:MOST_BARS]
    if not names:
        return None
    figure = _figure(0.9 + _BAR_INCHES * len(names) * max(1.3, len(groups)))
    axes = figure.subplots()
    height = 0.8 / len(groups)
    largest = max((value for values in groups.values() for value in values.values()), default=0) or 1
    for number, (kind, values) in enumerate(groups.items()):
        for row, name in enumerate(names):
            if (value := values.get(name)) is None:
                continue
            place = row - 0.4 + height * (number + 0.5)
            axes.barh(
                place,
                value,
                height,
                color="white" if number else COLOURS[0],
                edgecolor="black",
                hatch=HATCHES[number % len(HATCHES)],
                label=kind if kind not in axes.get_legend_handles_labels()[1] else None,
            )
            axes.text(value + 0.01 * largest, place, f"{value:.3g}", va="center", fontsize=8, parse_math=False)
    axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=8, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * largest)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(groups) > 1:
        # Below the axes: a bar may be anywhere inside.
        figure.legend(*axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    return _png(figure)


def _curves(panels: Mapping[str, Sequence[Series]], label: str, least_zero: bool = False) -> bytes:
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    figure = _figure(0.5 + _PANEL_INCHES * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, lines) in zip(grid, panels.items(), strict=False):
        axes.set_title(_short(title), loc="left", fontsize=10, parse_math=False)
        _draw_lines(axes, lines)
        axes.set_xlabel(label, fontsize=9)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if least_zero:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    return _png(figure)


def _draw_lines(axes: Axes, lines: Sequence[Series]) -> None:
    for number, (name, places, values) in enumerate(lines):
        axes.plot(
            places,
            values,
            color=COLOURS[number % len(COLOURS)],
            linestyle=_LINES[number % len(_LINES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            markevery=max(1, len(values) // MOST_MARKERS),
            markerfacecolor="white" if number % 2 else None,
            linewidth=1.5,
        )
        axes.lines[-1].set_label(_short(name))
    if len(lines) > 1:
        for words in axes.legend(fontsize=8, frameon=False, handlelength=4).get_texts():
            words.set_parse_math(False)


def _short(name: str) -> str:
    shown = "".join(one if one.isprintable() else "\ufffd" for one in name)
    shown = shown if len(shown) <= 44 else f"{shown[:28]}...{shown[-13:]}"
    return f" {shown}" if shown.startswith("_") else shown  # matplotlib leaves such labels out


def _figure(height_inches: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DPI, layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
