"""The picture of the phases of a step on each replica, as planned and as run. No TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.planning.quantities import duration
from tfpar.reports.step_phases import StepPhases

# Matplotlib is imported on first use.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the colour-blind safe palette of Okabe and Ito, those of the passes as in the timelines of pipelines; and hatches.
_LOOKS = {
    "forward": ("#0072B2", ""),
    "backward": ("#E69F00", "////"),
    "all-reduce": ("#CC79A7", "xxxx"),
    "update": ("#009E73", "...."),
}
_HEIGHT = 0.84
MOST_REPLICAS = 32


def figure(planned: StepPhases | None, measured: StepPhases) -> Figure:
    """Return the picture: a row is a replica, or all devices that were timed together; a box is a phase.

    Args:
        planned: The phases as planned; None to draw the measured ones alone.
        measured: The phases as run.

    Returns:
        The figure, of the first 32 replicas.

    Example:
        >>> run = StepPhases(("forward", "backward"), ((0.0, 0.1, 0.3), (0.1, 0.2, 0.4)))
        >>> [axes.get_title(loc="left") for axes in figure(None, run).axes]
        ['as run: 400 ms']
    """
    from matplotlib.figure import Figure

    panels = {"as run": measured} if planned is None else {"as planned": planned, "as run": measured}
    num_rows = min(len(measured.moments), MOST_REPLICAS)
    drawn = Figure(figsize=(9.0, 0.9 + len(panels) * (0.65 + 0.34 * num_rows)), dpi=110, layout="constrained")
    all_axes = drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    end_seconds = max(one.step_seconds for one in panels.values()) or 1e-3  # an axis needs a length
    for axes, (label, phases) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, phases, num_rows)
        axes.set_title(f"{label}: {duration(phases.step_seconds)}", loc="left", fontsize=10)
    all_axes[-1].set_xlim(0, 1e3 * end_seconds)
    all_axes[-1].set_xlabel("milliseconds")
    drawn.legend(*all_axes[-1].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
    return drawn


def _draw(axes: Axes, phases: StepPhases, num_rows: int) -> None:
    for number, name in enumerate(phases.names):
        colour, hatch = _LOOKS[name]
        rows = phases.moments[:num_rows]
        axes.barh(
            range(num_rows),
            [1e3 * (row[number + 1] - row[number]) for row in rows],
            _HEIGHT,
            [1e3 * row[number] for row in rows],
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            hatch=hatch,
            label=name,
        )
    labels = [f"replica {row}" for row in range(num_rows)] if num_rows > 1 else ["step"]
    axes.set_yticks(range(num_rows), labels, fontsize=9)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
