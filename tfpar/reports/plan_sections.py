"""The plan next to the measurement: predicted layouts, predicted and measured step, timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfpar.messages.number_format import figure
from tfpar.pipeline.analysis.stage_table import describe_step
from tfpar.planning.quantities import duration, memory, waits_in_words
from tfpar.reports import markup, phases_plot, pictures, step_phases
from tfpar.reports.advice import known_seconds, own_row, plan_rows
from tfpar.reports.markup import Markup, element
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.step_phases import StepPhases
from tfpar.reports.timelines import PipelineRecord

_FITS = {True: "yes", False: "no"}


def plan_section(run: RecordedRun) -> tuple[list[Markup], dict[str, bytes]]:
    """Return the table and the picture of a plan, and predicted next to measured figures.

    Args:
        run: A recorded run.

    Returns:
        The parts of the page, and its pictures by their names.
    """
    parts, images = list(_prediction(run)), {}
    rows = plan_rows(run)
    if rows:
        own = own_row(run, rows)
        steps = [row for row in rows if is_number(row.get("step_seconds"))]
        groups = {"predicted step": {str(row.get("layout")): 1e3 * row["step_seconds"] for row in steps}}
        tried = [row for row in steps if is_number(row.get("measured_seconds"))]
        measured = {str(row.get("layout")): 1e3 * row["measured_seconds"] for row in tried}
        if own is not None and run.step_seconds is not None:
            measured[str(own.get("layout"))] = 1e3 * run.step_seconds
        groups |= {"measured step": measured} if measured else {}
        png = pictures.bars("step of each layout", groups, "milliseconds")
        if png is not None:
            images["plan"] = png
            words = (
                "Bars of the predicted step of each layout, and of those measured; the values are in the table below."
            )
            parts.append(markup.picture(png, words))
        parts.append(_table(rows, own))
        parts += _runtime_note(run)
        notes = run.plan.get("notes")
        parts += [element("p", note, class_="note") for note in notes] if isinstance(notes, list) else []
    elif not parts:
        parts.append(element("p", "This run was not planned: its folder holds no plan and no prediction."))
    return parts, images


def _runtime_note(run: RecordedRun) -> Iterable[Markup]:
    """Yield why the memory of a row is more than that of the prediction, where it is."""
    measured = run.plan.get("measured")
    if not isinstance(measured, dict) or not is_number(run.prediction.get("planned_memory_bytes")):
        return
    runtime_bytes = measured.get("runtime_bytes")
    if measured.get("device") == "CPU" and is_number(runtime_bytes):
        own = memory(runtime_bytes)
        words = f"Here the memory of a device includes {own} of TensorFlow's own, and above it does not."
        yield element("p", words, class_="note")


def _prediction(run: RecordedRun) -> Iterable[Markup]:
    prediction = run.prediction
    seconds, num_bytes = (prediction.get(f"planned_{name}") for name in ("step_seconds", "memory_bytes"))
    previewed = prediction.get("previewed_step_seconds")
    step, used = (prediction.get(f"measured_{name}") for name in ("step_seconds", "memory_bytes"))
    step = step if is_number(step) else run.step_seconds
    rows = []
    if is_number(seconds):
        rows.append(("step", duration(seconds), "" if step is None else duration(step), _error(seconds, step)))
    if is_number(previewed):
        words = "step of the table of stages, without update"
        rows.append((words, duration(previewed), "" if step is None else duration(step), _error(previewed, step)))
    if is_number(num_bytes):
        shown = memory(used) if is_number(used) else ""
        rows.append(("memory of the fullest device", memory(num_bytes), shown, _error(num_bytes, used)))
    title = f"Prediction for {prediction.get('layout', 'this run')}"
    if rows:
        yield markup.table(title, ["figure", "predicted", "measured", "error of the prediction"], rows)


def _error(predicted: float, measured: Any) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %" if is_number(measured) and measured else ""


def _table(rows: list[Mapping[str, Any]], own: Mapping[str, Any] | None) -> Markup:
    cells = [_cells(row, row is own) for row in rows]
    heads = ["layout", "rank", "step", "examples/s", "times one", "memory a device", "fits", "waits for"]
    return markup.table("Predicted layouts", heads, cells, numbers=False)


def _cells(row: Mapping[str, Any], is_own: bool) -> tuple[str, ...]:
    predicted, waits, num_bytes, fits = (row.get(name) for name in ("step_seconds", "waits", "memory_bytes", "fits"))
    seconds = known_seconds(row)
    waiting = {name: value for name, value in waits.items() if is_number(value)} if isinstance(waits, dict) else {}
    is_timed = is_number(seconds) and seconds > 0
    return (
        f"{row.get('layout')}" + (" (this run)" if is_own else ""),
        "-" if row.get("rank") is None else str(row["rank"]),
        duration(seconds or 0.0) if is_timed else "",
        _number(row.get("examples_per_second")),
        _number(row.get("times_one")),
        memory(num_bytes) if is_number(num_bytes) else "",
        _FITS[fits] if isinstance(fits, bool) else "not known",
        waits_in_words(waiting, predicted or 1.0) if is_timed else "",
    )


def _number(value: Any) -> str:
    return figure(value) if is_number(value) else ""


def planned_phases(run: RecordedRun) -> StepPhases | None:
    """Return the phases of a step as planned; None without measured ones, or a plan of the layout.

    Args:
        run: A recorded run.
    """
    return None if run.phases is None else step_phases.planned(own_row(run, plan_rows(run)), run.phases)


def timeline_section(run: RecordedRun, planned: StepPhases | None, png: bytes | None) -> Iterable[Markup]:
    """Yield the timeline of a step, with the step in words.

    Args:
        run: A recorded run.
        planned: The result of `planned_phases`.
        png: The picture; None if there is none.
    """
    if run.pipeline is not None:
        yield element("h3", "Timeline of a step")
        yield from _pipeline(run, run.pipeline, png)
    elif run.phases is not None:
        yield element("h3", "Timeline of a step")
        yield from _phases(run.phases, planned, png)


def _pipeline(run: RecordedRun, record: PipelineRecord, png: bytes | None) -> Iterable[Markup]:
    planned, measured = record.planned, record.measured
    lines = [("as planned", duration(planned.step_seconds), f"{100 * planned.bubble:.1f} %")]
    if measured is not None:
        lines.append(("as run", duration(measured.step_seconds), f"{100 * measured.bubble:.1f} %"))
    if run.step_seconds is not None:
        lines.append(("in training, with update and waiting", duration(run.step_seconds), ""))
    yield markup.table("Step of the pipeline", ["step", "time", "bubble"], lines)
    if png is not None:
        words = f"Actions of all devices over time: as planned, {describe_step(planned)}"
        words += "." if measured is None else f"; as run, {describe_step(measured)}."
        yield markup.picture(png, words, "Numbers are micro-batches. Grey is the bubble: no action runs.")
    if measured is None:
        yield element("p", "With --trace the train command also times the actions of a step.", class_="note")


def _phases(measured: StepPhases, planned: StepPhases | None, png: bytes | None) -> Iterable[Markup]:
    of_plan = {} if planned is None else planned.seconds
    lines = [
        (name, duration(of_plan[name]) if name in of_plan else "", duration(seconds), f"{share:.0f} %")
        for name, seconds in measured.seconds.items()
        for share in [100 * seconds / (measured.step_seconds or 1.0)]
    ]
    title = "Phases of a step" + (", means of the replicas" if len(measured.moments) > 1 else "")
    yield markup.table(title, ["phase", "as planned", "as run", "share"], lines)
    if png is not None:
        words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in measured.seconds.items())
        rows, most = len(measured.moments), phases_plot.MOST_REPLICAS
        caption = f"The first {most} of {rows} replicas." if rows > most else ""
        yield markup.picture(png, f"Phases of a step over time; as run: {words}.", caption)
    yield element(
        "p",
        "Medians of timed steps, whose phases run one after another. Without --trace gradients may be summed, and "
        "weights updated, during the backward pass; several workers sum them during it here, too. A replica that waits "
        "for a slower one waits in the all-reduce.",
        class_="note",
    )
