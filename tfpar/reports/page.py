"""The report of a run as an HTML page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tfpar.config import toml
from tfpar.messages.number_format import counted, describe_flops, duration, figure, memory, three_digits
from tfpar.messages.received import excerpt
from tfpar.reports import events, pictures, templates
from tfpar.reports.advice import advise
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.templates import Table

MOST_EPOCHS, MOST_LAYERS, MOST_EVENTS, MOST_PLANNED = 200, 500, 200, 50
STATUSES = {
    "trained": "trained to its end",
    "interrupted": "interrupted, with a checkpoint to resume from",
    "failed": "failed",
    "training": "still training: the report is incomplete",
    "not ended": "not ended: its process was killed, or runs on another machine",
    "not known": "not known",
}
_EVENTS = {
    events.STARTED: "started",
    events.RESUMED: "resumed",
    events.NONFINITE: "loss not finite",
    events.STOPPED_EARLY: "stopped early",
    events.INTERRUPTED: "interrupted",
    events.FAILED: "failed",
    events.TRAINED: "trained to its end",
}
_TIMES = {
    "first_call": "first call of a step, with compilation",
    "steps": "later steps, without waiting",
    "data": "waiting for data",
    "validation": "validation",
}


def report(run: RecordedRun, place: Path | None = None) -> str:
    """Return the report of a run as a self-contained HTML page.

    Args:
        run: The run.
        place: The folder of the page, for relative links. Defaults to the folder of the run.

    Example:
        >>> report(RecordedRun(Path("runs/digits"), {}, (), {}, (), "not known", {})).startswith("<!DOCTYPE html>")
        True
    """
    tiles = headline(run)
    lost = events.lost_ends(run.events)
    return templates.render(
        "run.html",
        title=f"Run {run.name}",
        status=run.status,
        state=tiles.pop("state"),
        subtitle=" · ".join(filter(None, [str(run.folder), _text(run.table("layout").get("strategy"))])),
        notes=run.notes,
        tiles=tiles,
        advice=advise(run),
        metrics=pictures.metrics(run),
        epochs=_epochs(run),
        speed=pictures.speed(run),
        epoch_speeds=_epoch_speeds(run),
        profile=_profile(run, place or run.folder),
        times=list(_times(run)),
        memory=_memory(run),
        has_devices=bool(run.device_peaks),
        model=_model(run),
        stages=_text(run.table("layout").get("stages")),
        timeline=pictures.timeline(run),
        pipeline=_pipeline(run),
        is_traced=run.pipeline is not None and run.pipeline.measured is not None,
        plan=_plan(run),
        layers=_layers(run),
        events=_events(run, lost),
        num_resumed=sum(event.kind == events.RESUMED for event in run.events),
        num_failed=sum(event.kind == events.FAILED for event in run.events) + len(lost),
        parity=list(_parity(run)),
        differences=_differences(run),
        environment=_environment(run),
        settings=Table(
            "Settings", ["setting", "value"], [(key, show(value)) for key, value in run.settings.items()], False
        ),
    )


def headline(run: RecordedRun) -> dict[str, str]:
    """Return the most important figures of a run, by name."""
    figures = run.figures
    rows = {"state": STATUSES.get(run.status, run.status)}
    epochs, steps = figures.get("epochs", figures.get("epoch")), figures.get("steps", figures.get("step"))
    if is_number(epochs) and is_number(steps):
        rows["trained"] = f"{counted(epochs, 'epoch')}, {counted(steps, 'step')}"
    if is_number(figures.get("weights_of_epoch")):
        rows["trained"] += f"; the weights are those of epoch {figures['weights_of_epoch']}"
    for name in pictures.metric_names(run):
        value, validation = (figures.get(log) for log in (name, f"val_{name}"))
        shown = [figure(value)] if is_number(value) else []
        shown += [f"in validation {figure(validation)}"] if is_number(validation) else []
        rows |= {name: ", ".join(shown)} if shown else {}
    if run.step_seconds is not None:
        rows["step"] = duration(run.step_seconds)
    if is_number(figures.get("examples_per_second")):
        rows["speed"] = f"{figure(round(figures['examples_per_second']))} examples/s"
    if is_number(figures.get("data_wait_share")):
        rows["waiting for data"] = f"{100 * figures['data_wait_share']:.0f} % of a step"
    if is_number(figures.get("flops_per_step")):
        mfu = figures.get("mfu")
        rows["FLOPs"] = describe_flops(figures["flops_per_step"], mfu if is_number(mfu) else None)
    if run.fullest_bytes is not None:
        rows["peak memory"] = f"{memory(run.fullest_bytes)} on the fullest device"
    elif is_number(run.process_bytes):
        rows["peak memory"] = f"{memory(run.process_bytes)} of the process"
    return rows


def _epochs(run: RecordedRun) -> Table:
    logs = [log for name in pictures.metric_names(run) for log in (name, f"val_{name}")]
    columns = [log for log in logs if any(log in entry for entry in run.epochs)]
    every = -(-len(run.epochs) // MOST_EPOCHS)
    entries = [entry for number, entry in enumerate(run.epochs, start=1) if number % every == 0 or number == 1]
    caption = "Loss and metrics of each epoch" if every <= 1 else f"Loss and metrics of every {every}th epoch"
    rows = [(entry["epoch"], *(_value(entry.get(name)) for name in columns)) for entry in entries]
    return Table(caption, ["epoch", *columns], rows)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return figure(value) if is_number(value) else ""


def _percent(value: Any) -> str:
    return f"{100 * value:.1f}" if is_number(value) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _epoch_speeds(run: RecordedRun) -> Table:
    rows = [
        (
            entry["epoch"],
            _value(entry.get("examples_per_second")),
            _value(entry["step_milliseconds"]),
            _percent(entry.get("data_wait_share")),
        )
        for entry in run.epochs[-MOST_EPOCHS:]
        if is_number(entry.get("step_milliseconds"))
    ]
    return Table("Speed of each epoch", ["epoch", "examples/s", "step, ms", "waiting for data, %"], rows)


def _profile(run: RecordedRun, place: Path) -> dict[str, str]:
    """Return the link to the profiles of steps and the command that shows them; empty without profiles."""
    if run.profile is None:
        return {}
    link = quote(os.path.relpath(run.profile, place))
    return {"link": link, "command": f"tensorboard --logdir {shlex.quote(str(run.profile.parent.parent))}"}


def _times(run: RecordedRun) -> Iterator[dict[str, Any]]:
    seconds = run.table("seconds")
    parts = {words: seconds[name] for name, words in _TIMES.items() if is_number(seconds.get(name))}
    total = seconds.get("fit")
    if not is_number(total) or total <= 0:
        return
    parts["rest: callbacks, checkpoints, starts of epochs"] = max(0.0, total - sum(parts.values()))
    for name, value in parts.items():
        yield {"name": name, "time": f"{three_digits(value)} s", "percent": 100 * value / total}


def _memory(run: RecordedRun) -> Table:
    peaks = {**run.device_peaks, "the process": run.process_bytes}
    rows = [(name, memory(value)) for name, value in peaks.items() if is_number(value)]
    return Table("Peak memory", ["device", "peak"], rows)


def _model(run: RecordedRun) -> Table:
    model, layout = run.table("model"), run.table("layout")
    facts = {name: model.get(name) for name in ("name", "parameters", "precision", "optimizer", "data")}
    facts |= {name: layout.get(name) for name in ("strategy", "batch")}
    rows = [(name, f"{value:,}" if is_number(value) else value) for name, value in facts.items() if value]
    return Table("Model and layout", ["", "value"], rows, are_numbers=False)


def _layers(run: RecordedRun) -> Table:
    layers = run.rows("model", "layers")
    count = f"{len(layers):,}" if len(layers) <= MOST_LAYERS else f"the first {MOST_LAYERS} of {len(layers):,}"
    rows = [
        (row.get("name"), row.get("class"), row.get("shape") or "", _value(row.get("parameters")))
        for row in layers[:MOST_LAYERS]
    ]
    return Table(f"Layers ({count})", ["layer", "class", "output", "parameters"], rows, are_numbers=False)


def _pipeline(run: RecordedRun) -> Table:
    rows = []
    if run.pipeline is not None:
        steps = {"as planned": run.pipeline.planned, "as run": run.pipeline.measured}
        rows = [
            (name, duration(step.step_seconds), f"{100 * step.bubble:.1f} %")
            for name, step in steps.items()
            if step is not None
        ]
        if run.step_seconds is not None:
            rows.append(("in training, with update and waiting", duration(run.step_seconds), ""))
    return Table("Step of the pipeline", ["step", "time", "bubble"], rows)


def _plan(run: RecordedRun) -> Table:
    """Return the rows of the plan, without columns of nested values."""
    recorded = run.plan.get("rows")
    plan = [row for row in recorded if isinstance(row, Mapping)] if isinstance(recorded, list) else []
    columns = dict.fromkeys(key for row in plan for key, value in row.items() if isinstance(value, str | int | float))
    heads = [key.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ") for key in columns]
    rows = [[_planned(key, row.get(key)) for key in columns] for row in plan[:MOST_PLANNED]]
    return Table("Planned layouts", heads, rows, are_numbers=False)


def _planned(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not is_number(value):
        return _text(value)
    if value >= 0 and key.endswith("_seconds"):
        return duration(value)
    return memory(value) if value >= 0 and key.endswith("_bytes") else figure(value)


def _events(run: RecordedRun, lost: list[events.Event]) -> Table:
    rows = [
        (
            event.time,
            _EVENTS.get(event.kind, event.kind) + (", and killed or crashed" if event in lost else ""),
            "" if event.step is None else f"{event.step:,}",
            event.detail,
        )
        for event in run.events[-MOST_EVENTS:]
    ]
    return Table("What happened", ["time, UTC", "event", "step", "detail"], rows, are_numbers=False)


def _parity(run: RecordedRun) -> Iterator[str]:
    every = run.settings.get("callbacks.check_replicas_every_steps")
    if is_number(every):
        end = "no difference was found" if run.status == "trained" else "a difference would be a failure above"
        yield f"The weights of all replicas were compared every {every} steps: {end}."
    if parity := run.parity:
        verdict = "equal to one device" if parity.get("equal") is True else "NOT equal to one device"
        tolerance = parity.get("tolerance")
        within = f", tolerance {tolerance:g}" if is_number(tolerance) else ""
        conditions = f" {parity['conditions']}" if parity.get("conditions") else ""
        yield f"{parity.get('strategy')}: {verdict} after {parity.get('num_steps')} steps{within}{conditions}."


def _differences(run: RecordedRun) -> Table:
    tables = [run.parity[name] for name in ("weights", "logs") if isinstance(run.parity.get(name), list)]
    rows = [
        (row.get("name"), *(_tiny(row.get(f"after_{step}_step")) for step in ("first", "last")))
        for table in tables
        for row in table
        if isinstance(row, Mapping)
    ]
    return Table("Relative differences", ["weight or log", "first step", "last step"], rows[:MOST_LAYERS])


def _tiny(value: Any) -> str:
    return f"{value:.1e}" if is_number(value) and value == value else ""


def _environment(run: RecordedRun) -> Table:
    facts = {**run.table("versions"), **run.table("machine")}
    rows = [
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in facts.items()
    ]
    return Table("Environment of the last process", ["", "value"], rows, are_numbers=False)


def show(value: Any) -> str:
    """Format the value of a setting as TOML, or as Python if TOML cannot express it."""
    try:
        return toml.show(value)
    except (TypeError, ValueError):
        return str(value)


def shown(value: str) -> str:
    """Escape unprintable characters for a terminal, and shorten a long text."""
    return excerpt(value, 400)
