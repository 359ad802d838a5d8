"""Gantt charts of planned and measured schedules. No TensorFlow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfpar.files import atomic_file
from tfpar.pipeline.analysis.stage_table import describe_schedule, describe_step
from tfpar.pipeline.schedule import Action, Kind, Schedule
from tfpar.pipeline.schedule.simulator import Span, Timeline

# Matplotlib is imported on first use: strategies import this module, and few runs draw.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour-blind safe palette of Okabe and Ito. Lightness and hatches differ too, for prints in grey.
_COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#E69F00", "W": "#009E73"}
_HATCHES: dict[Kind, str] = {"F": "", "B": "////", "W": "...."}
BUBBLE = "#E4E4E4"
_MARGIN_INCHES = 1.1
_BOX_HEIGHT = 0.84
_LARGEST_POINTS, _SMALLEST_POINTS = 9.0, 5.0
_DIGIT_WIDTH = 0.64  # relative to the size of the bundled font


def draw(planned: Timeline, measured: Timeline | None, schedule: Schedule, path: Path | None) -> bytes:
    """Draw a planned schedule, and a measured one below it on the same time axis, as a PNG image.

    Args:
        planned: The result of `simulate`.
        measured: A measured timeline of the same schedule, or None.
        schedule: The schedule of both.
        path: File in an existing folder to write the image to, or None.

    Returns:
        The bytes of the image, 9 to 18 inches wide at 150 dots per inch.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> from tfpar.pipeline.schedule.simulator import Durations, simulate
        >>> gpipe = make("gpipe", num_stages=2, num_microbatches=2)
        >>> timeline = simulate(gpipe, Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.0,)))
        >>> draw(timeline, None, gpipe, path=None)[1:4]
        b'PNG'
    """
    buffer = io.BytesIO()
    figure(planned, measured, schedule).savefig(buffer, format="png")
    if path is not None:
        atomic_file.write(path, buffer.getvalue())
    return buffer.getvalue()


def figure(planned: Timeline, measured: Timeline | None, schedule: Schedule) -> Figure:
    """Return the picture of `draw` as a figure, without a window or pyplot state.

    Each row is a device, and each box an action, with the index of its micro-batch if there is room. Grey is the
    bubble. Later stages of a device have lighter colours.

    Args:
        planned: The result of `simulate`.
        measured: A measured timeline of the same schedule, or None.
        schedule: The schedule of both.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> from tfpar.pipeline.schedule.simulator import Durations, simulate
        >>> gpipe = make("gpipe", num_stages=2, num_microbatches=2)
        >>> timeline = simulate(gpipe, Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.0,)))
        >>> figure(timeline, timeline, gpipe).get_suptitle()
        'gpipe: 2 stages on 2 devices, 2 micro-batches'
    """
    from matplotlib.figure import Figure

    panels = {"as planned": planned} | ({} if measured is None else {"as run": measured})
    per_device = max(len(order) for order in schedule.actions)
    width_inches = min(18.0, max(9.0, 0.25 * per_device))
    num_devices = len(schedule.actions)
    row_inches = 0.42 if num_devices <= 4 else 0.32
    height_inches = 1.1 + len(panels) * (0.75 + row_inches * num_devices)
    drawn = Figure(figsize=(width_inches, height_inches), dpi=150, layout="constrained")
    drawn.suptitle(describe_schedule(schedule), fontsize=13, fontweight="bold")
    end_seconds = max(timeline.step_seconds for timeline in panels.values()) or 1e-3  # an axis needs a length
    points_per_second = (width_inches - _MARGIN_INCHES) * 72 / end_seconds
    all_axes = drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, timeline) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, f"{label}: {describe_step(timeline)}", timeline, schedule, points_per_second)
    all_axes[-1].set_xlim(0, 1e3 * end_seconds)
    all_axes[-1].set_xlabel("milliseconds")
    drawn.legend(**_legend(schedule), loc="outside lower center", frameon=False, fontsize=9)
    return drawn


def _draw_panel(axes: Axes, title: str, timeline: Timeline, schedule: Schedule, points_per_second: float) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    num_devices = len(schedule.actions)
    for device in range(num_devices):
        spans = [span for span in timeline.spans if span.device == device]
        row = (device - _BOX_HEIGHT / 2, _BOX_HEIGHT)
        axes.broken_barh([(0, 1e3 * timeline.step_seconds)], row, facecolors=BUBBLE)
        for kind, hatch in _HATCHES.items():
            same_kind = [span for span in spans if span.action.kind == kind]
            axes.broken_barh(
                [(1e3 * span.begin_seconds, 1e3 * (span.end_seconds - span.begin_seconds)) for span in same_kind],
                row,
                facecolors=[_colour(span.action, schedule) for span in same_kind],
                edgecolors="white",
                linewidths=0.5,
                hatch=hatch,
                hatch_linewidth=0.4,
            )
    _label(axes, timeline, schedule, points_per_second)
    axes.set_yticks(range(num_devices), [_row_label(device, schedule) for device in range(num_devices)])
    axes.set_ylim(num_devices - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _row_label(device: int, schedule: Schedule) -> str:
    replica = device // schedule.num_devices
    return f"replica {replica}, device {device}" if schedule.num_replicas > 1 else f"device {device}"


def _label(axes: Axes, timeline: Timeline, schedule: Schedule, points_per_second: float) -> None:
    """Write the indices of micro-batches into all boxes that are wide enough, in one font size."""

    def fitting_points(span: Span) -> float:
        width_points = (span.end_seconds - span.begin_seconds) * points_per_second
        return 0.9 * width_points / (_DIGIT_WIDTH * len(str(span.action.microbatch)))

    wide = [span for span in timeline.spans if fitting_points(span) >= _SMALLEST_POINTS]
    size_points = min([_LARGEST_POINTS, *map(fitting_points, wide)])
    for span in wide:
        red, green, blue = _colour(span.action, schedule)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.45
        axes.text(
            500 * (span.begin_seconds + span.end_seconds),
            span.device,
            str(span.action.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size_points,
            color="white" if dark else "black",
        )


def _colour(action: Action, schedule: Schedule) -> tuple[float, float, float]:
    """Return the colour of a kind of action, lighter for the later stages of a device."""
    from matplotlib.colors import to_rgb

    stages_per_device = schedule.num_stages // schedule.num_devices
    white = 0.6 * (action.stage // schedule.num_devices) / max(1, stages_per_device - 1)
    red, green, blue = (part + white * (1 - part) for part in to_rgb(_COLOURS[action.kind]))
    return red, green, blue


def _legend(schedule: Schedule) -> dict[str, Any]:
    """Return the arguments of the legend: one column for each kind of action, and one for the bubble."""
    from matplotlib.patches import Patch

    words: dict[Kind, str] = {"F": "forward", "B": "backward"}
    if schedule.splits_backward:
        words |= {"B": "input gradient", "W": "weight gradient"}
    stages_per_device = schedule.num_stages // schedule.num_devices
    handles = []
    for kind, word in words.items():
        for first in range(0, schedule.num_stages, schedule.num_devices):
            last = first + schedule.num_devices - 1
            stages = f", stage {first}" if first == last else f", stages {first} to {last}"
            colour = _colour(Action(kind, first, 0), schedule)
            handles.append(
                Patch(
                    facecolor=colour,
                    edgecolor="white",
                    hatch=_HATCHES[kind],
                    label=word if stages_per_device == 1 else word + stages,
                )
            )
    empty = [Patch(visible=False, label="") for _ in range(stages_per_device - 1)]
    return {
        "handles": [*handles, Patch(color=BUBBLE, label="bubble (no action runs)"), *empty],
        "ncols": len(words) + 1,
    }
