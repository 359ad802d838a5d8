"""The figures of a report: inline SVG that follows the text colour of the page, light or dark.

Lines differ in style and marker, not in colour alone. Matplotlib is imported on first use.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tfpar.pipeline.analysis import timeline_plot
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.timelines import MOST_SPANS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Placeholder for the text colour of the page.
_TEXT_COLOUR = "#010203"
_STYLE: Any = {  # Matplotlib's stubs require a literal type for all keys
    "svg.fonttype": "none",
    # A dollar sign in a name does not start a formula.
    "text.parse_math": False,
    "font.size": 9,
    "patch.edgecolor": _TEXT_COLOUR,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _TEXT_COLOUR
    ),
}
_CSS_COLOURS = {_TEXT_COLOUR: "currentColor", timeline_plot.BUBBLE: "rgba(128, 128, 128, 0.25)"}
# Based on the colour-blind safe palette of Okabe and Ito, with a contrast of at least 3 to white and to black.
COLOURS = ("#2B83C4", "#D9622B", "#1A9E77", "#C0639F", _TEXT_COLOUR, "#B8860B")
_LINES = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "X")
MOST_METRICS, MOST_MARKERS = 8, 40
_FIGURES = ("epoch", "step", "examples_per_second", "step_milliseconds", "data_wait_share")

Series = tuple[str, Sequence[float], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure of a page.

    Args:
        title: The heading.
        description: The text for screen readers.
        svg: The `<svg>` element.
    """

    title: str
    description: str
    svg: Markup


def metric_names(*runs: RecordedRun) -> list[str]:
    """Return the names of the scalar logs, the loss first, without `val_` and without figures of speed."""
    names: dict[str, None] = {}
    for entry in (entry for run in runs for entry in run.epochs):
        names |= {name.removeprefix("val_"): None for name, value in entry.items() if is_number(value)}
    return sorted((name for name in names if name not in _FIGURES), key=lambda name: name != "loss")


def metrics(run: RecordedRun) -> list[Picture]:
    """Plot loss and metrics by epoch, training and validation together."""
    pictures = []
    for name in metric_names(run)[:MOST_METRICS]:
        curves = [
            ("training", *curve(run.epochs, "epoch", name)),
            ("validation", *curve(run.epochs, "epoch", f"val_{name}")),
        ]
        pictures += _curves(name, "epoch", curves)
    return pictures


def speed(run: RecordedRun) -> list[Picture]:
    """Plot the speed and the fraction of time spent waiting for data, by step."""
    pictures = []
    for name, title, scale in (
        ("examples_per_second", "examples/s", 1.0),
        ("data_wait_share", "waiting for data, %", 100.0),
    ):
        curves = [("epoch", *curve(run.epochs, "step", name, scale))]
        curves += [("calls of the last process", *curve(run.rows("points"), "step", name, scale))]
        pictures += _curves(title, "step", curves, starts_at_zero=True)
    return pictures


def compared(runs: Mapping[str, RecordedRun]) -> list[Picture]:
    """Plot the losses of several runs together: the validation losses if all runs have them.

    Args:
        runs: The runs, by name.
    """
    validates = all(any("val_loss" in entry for entry in run.epochs) for run in runs.values())
    name, title = ("val_loss", "validation loss") if validates else ("loss", "loss")
    return _curves(title, "epoch", [(key, *curve(run.epochs, "epoch", name)) for key, run in runs.items()], width=6.2)


def curve(
    entries: Sequence[Mapping[str, Any]], place: str, name: str, scale: float = 1.0
) -> tuple[list[float], list[float]]:
    """Return the x and y values of a curve, without missing and non-finite ones.

    Args:
        entries: Recorded figures, a row per point.
        place: The figure on the x axis.
        name: The figure on the y axis.
        scale: Factor for the y values.

    Example:
        >>> curve([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": "x"}], "epoch", "loss")
        ([1], [0.5])
    """
    points = [(entry.get(place), entry.get(name)) for entry in entries]
    finite = [(x, scale * y) for x, y in points if is_number(x) and is_number(y) and math.isfinite(y)]
    return [x for x, _ in finite], [y for _, y in finite]


def timeline(run: RecordedRun) -> list[Picture]:
    """Plot the timeline of a pipeline's step, as planned and as run, for all devices.

    Returns:
        A figure, or none if no step was recorded or it has too many actions to be legible.
    """
    record = run.pipeline
    if record is None or len(record.planned.spans) > MOST_SPANS:
        return []
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = timeline_plot.figure(record.planned, record.measured, record.schedule)
        words = "Actions of all devices over time. Numbers are micro-batches; grey is the bubble, when no action runs."
        return [Picture("Timeline of a step", words, _svg(figure, "timeline"))]


def _curves(
    title: str, label: str, curves: Sequence[Series], *, starts_at_zero: bool = False, width: float = 4.2
) -> list[Picture]:
    """Return a figure of the curves, or none if all are empty."""
    curves = [series for series in curves if series[1]]
    if not curves:
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        legend_columns = 2 if width < 5 else 3
        height = 2.2 + 0.16 * -(-len(curves) // legend_columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        _draw_lines(axes, curves)
        if len(curves) > 1:
            figure.legend(loc="outside upper left", fontsize=8, frameon=False, handlelength=3, ncols=legend_columns)
        axes.set_xlabel(label)
        axes.grid(axis="y", linewidth=0.5, alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.locator_params(axis="x", integer=True)
        if starts_at_zero:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        lines = ", ".join(name for name, *_ in curves)
        return [Picture(title, f"Curves of {title} by {label}: {lines}.", _svg(figure, f"{title} {label}"))]


def _draw_lines(axes: Axes, curves: Sequence[Series]) -> None:
    for number, (name, places, values) in enumerate(curves):
        (line,) = axes.plot(
            places,
            values,
            color=COLOURS[number % len(COLOURS)],
            linestyle=_LINES[number % len(_LINES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=3.5,
            markevery=max(1, len(values) // MOST_MARKERS),
            linewidth=1.5,
        )
        line.set_label(_short(name))


def _short(name: str) -> str:
    shown = "".join(character if character.isprintable() else "\ufffd" for character in name)
    shown = shown if len(shown) <= 44 else f"{shown[:28]}...{shown[-13:]}"
    return f" {shown}" if shown.startswith("_") else shown  # Matplotlib omits labels that begin with "_"


def _svg(figure: Figure, name: str) -> Markup:
    """Return a figure as an `<svg>` element, whose colours and width the page sets.

    Matplotlib escapes all texts, so that everything that looks like a tag is one.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    text = buffer.getvalue()
    prefix = re.sub(r"\W", lambda match: f"_{ord(match[0]):x}", name)
    return Markup(re.sub(r"<[^<>]*>", lambda tag: _styled(tag[0], prefix), text[text.index("<svg") :]))


def _styled(tag: str, prefix: str) -> str:
    """Return a tag with CSS colours, and with ids unique to this figure."""
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height|version)="[^"]*"', "", tag)
    for colour, css in _CSS_COLOURS.items():
        tag = tag.replace(colour.lower(), css)
    return re.sub(r'( id="|url\(#|href="#)', rf"\1{prefix}-", tag)
