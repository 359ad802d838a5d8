"""The report of one run as a page. No TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpar.config import toml
from tfpar.messages.number_format import counted, figure, three_digits
from tfpar.messages.received import excerpt
from tfpar.planning.quantities import duration, memory
from tfpar.reports import events, markup, pictures
from tfpar.reports.advice import Advice, advise
from tfpar.reports.markup import Markup, element
from tfpar.reports.number_check import is_number
from tfpar.reports.plan_sections import plan_section, planned_phases, timeline_section
from tfpar.reports.recorded_run import RecordedRun

MOST_EPOCHS, MOST_LAYERS, MOST_EVENTS = 200, 500, 200
STATUSES = {
    "trained": "trained to its end",
    "interrupted": "interrupted, with a checkpoint to resume from",
    "failed": "failed",
    "training": "still training: this is what is there until now",
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
SHARED_MEMORY = (
    "The figure of the process is its largest resident memory, which TensorFlow and Python are part of. Logical CPUs "
    "share it, so there is none for each."
)


def report(run: RecordedRun) -> tuple[str, dict[str, bytes]]:
    """Return the report of a run.

    Args:
        run: A recorded run.

    Returns:
        The page, one file that loads nothing; and its pictures, PNG images by their names.

    Example:
        >>> from pathlib import Path
        >>> page, images = report(RecordedRun(Path("runs/digits"), {}, (), {}, (), "not known", {}))
        >>> page.startswith("<!DOCTYPE html>"), images
        (True, {})
    """
    phases = planned_phases(run)
    drawn = {
        "metrics": pictures.metrics(run),
        "speed": pictures.speed(run),
        "timeline": pictures.timeline(run, phases),
    }
    images = {name: png for name, png in drawn.items() if png is not None}
    plan, plan_images = plan_section(run)
    memory_part, memory_images = _memory(run)
    images |= plan_images | memory_images
    sections = [
        markup.section("faster", "What would make it faster", *_advice(advise(run))),
        markup.section("metrics", "Loss and metrics", *_metrics(run, images.get("metrics"))),
        markup.section("speed", "Speed and waiting for data", *_speed(run, images.get("speed"))),
        markup.section("plan", "Plan and measurement", *plan, *timeline_section(run, phases, images.get("timeline"))),
        markup.section("memory", "Memory", *memory_part),
        markup.section("events", "Resumptions and failures", *_events(run)),
        markup.section("parity", "Parity", *_parity(run)),
        markup.section("model", "Model and layout", *_model(run)),
        markup.section("configuration", "Configuration and environment", *_configuration(run)),
    ]
    return markup.page(f"Run {run.name}", _head(run), sections), images


def headline(run: RecordedRun) -> dict[str, str]:
    """Return the figures of a run that matter first, by their names.

    Args:
        run: A recorded run.
    """
    figures = run.figures
    rows = {"state": STATUSES.get(run.status, run.status)}
    epochs, steps = figures.get("epochs", figures.get("epoch")), figures.get("steps", figures.get("step"))
    if is_number(epochs) and is_number(steps):
        rows["trained"] = f"{counted(epochs, 'epoch')}, {counted(steps, 'step')}"
    if is_number(figures.get("weights_of_epoch")):
        rows["trained"] += f"; the weights are those of epoch {figures['weights_of_epoch']}"
    for name in pictures.metric_names(run):
        value, validation = (figures.get(one) for one in (name, f"val_{name}"))
        shown = [figure(value)] if is_number(value) else []
        shown += [f"in validation {figure(validation)}"] if is_number(validation) else []
        rows |= {name: ", ".join(shown)} if shown else {}
    if run.step_seconds is not None:
        rows["step"] = duration(run.step_seconds)
    if is_number(figures.get("examples_per_second")):
        rows["speed"] = f"{figure(round(figures['examples_per_second']))} examples/s"
    if is_number(figures.get("data_wait_share")):
        rows["waiting for data"] = f"{100 * figures['data_wait_share']:.0f} % of a step"
    if (peak := peak_bytes(run)) is not None:
        rows["peak memory"] = peak
    return rows


def peak_bytes(run: RecordedRun) -> str | None:
    """Return the peak memory of the fullest device, or of the process without GPUs, in words; None if not known.

    Args:
        run: A recorded run.
    """
    if run.fullest_bytes is not None:
        return f"{memory(run.fullest_bytes)} on the fullest device"
    of_process = run.process_bytes
    return f"{memory(of_process)} of the process" if is_number(of_process) else None


def _head(run: RecordedRun) -> Iterable[Markup]:
    yield element("p", f"Folder {run.folder}", class_="note")
    yield markup.table("Summary", ["figure", "value"], headline(run).items(), numbers=False)
    if run.notes:
        yield element("ul", *(element("li", note) for note in run.notes), class_="note")


def _advice(found: Sequence[Advice]) -> Iterable[Markup]:
    if not found:
        yield element("p", "Nothing in the measured and predicted figures: no change is known to gain 3 % or more.")
        return
    yield element("ol", markup.joined(element("li", *_change(one)) for one in found))
    yield element(
        "p",
        "Gains do not add up: each is for that change alone. A change that can train other weights needs another "
        "--directory.",
        class_="note",
    )


def _change(one: Advice) -> Iterable[Markup]:
    gain = "Gain not known" if one.times is None else f"{one.times:.2f} times the speed"
    yield element("p", element("strong", gain), f" ({one.basis}). {one.what}")
    if one.settings:
        folder = "another folder" if one.another_run else "the same folder"
        yield element("p", element("code", one.line), f" in {folder}")


def _metrics(run: RecordedRun, png: bytes | None) -> Iterable[Markup]:
    names = pictures.metric_names(run)
    if png is None:
        yield element("p", "No epoch is complete.")
        return
    alternative = f"Curves by epoch of {', '.join(names[: pictures.MOST_METRICS])}. The values are in the table below."
    yield markup.picture(png, alternative, "Circles and a solid line: training. Squares and dashes: validation.")
    columns = [one for name in names for one in (name, f"val_{name}") if any(one in entry for entry in run.epochs)]
    every = -(-len(run.epochs) // MOST_EPOCHS)
    entries = [entry for number, entry in enumerate(run.epochs, start=1) if number % every == 0 or number == 1]
    rows = [(entry["epoch"], *(_value(entry.get(name)) for name in columns)) for entry in entries]
    shown = "Loss and metrics of each epoch" if every == 1 else f"Loss and metrics of every {every}th epoch"
    yield markup.table(shown, ["epoch", *columns], rows)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(one) for one in value)
    return figure(value) if is_number(value) else ""


def _speed(run: RecordedRun, png: bytes | None) -> Iterable[Markup]:
    if png is not None:
        words = "Examples per second and the share of time waiting for data, over the steps of the run."
        yield markup.picture(png, words, "Without the first call of each process, which compiles.")
    else:
        yield element("p", "No step was timed: the first call of each process compiles, and is left out.")
    rows = [
        (
            entry["epoch"],
            _value(entry.get("examples_per_second")),
            _value(entry.get("step_milliseconds")),
            "" if not is_number(share := entry.get("data_wait_share")) else f"{100 * share:.1f}",
        )
        for entry in run.epochs[-MOST_EPOCHS:]
        if is_number(entry.get("step_milliseconds"))
    ]
    heads = ["epoch", "examples/s", "step, ms", "waiting for data, %"]
    yield markup.table("Speed of each epoch", heads, rows)
    yield _times(run)


def _times(run: RecordedRun) -> Markup:
    times = {name: value for name, value in run.table("seconds").items() if is_number(value)}
    total = times.pop("fit", 0.0)
    if not total:
        return Markup("")
    words = {
        "first_call": "first call of a step, with compilation",
        "steps": "later steps, without waiting",
        "data": "waiting for data",
        "validation": "validation",
    }
    parts = {words.get(name, name): value for name, value in times.items()}
    parts["rest: callbacks, checkpoints, starts of epochs"] = max(0.0, total - sum(parts.values()))
    rows = [
        (name, three_digits(value), f"{100 * value / total:.0f}") for name, value in [*parts.items(), ("all", total)]
    ]
    return markup.table("Where the time of the last process went", ["part", "seconds", "%"], rows)


def _memory(run: RecordedRun) -> tuple[list[Markup], dict[str, bytes]]:
    planned = run.prediction.get("planned_memory_bytes")
    devices = run.device_peaks
    of_process = run.process_bytes
    rows: list[tuple[str, ...]] = [(name, memory(value)) for name, value in devices.items()]
    rows += [("the process", memory(of_process))] if is_number(of_process) else []
    if is_number(planned):
        rows.append(("predicted for the fullest device", memory(planned)))
    if not rows:
        return [element("p", "Not measured: a run measures its memory at its end.")], {}
    parts = [markup.table("Peak memory", ["device", "peak"], rows)]
    images = {}
    if devices:
        groups = {"measured peak": {name: value / 1e6 for name, value in devices.items()}}
        groups |= {"predicted": dict.fromkeys(devices, planned / 1e6)} if is_number(planned) else {}
        png = pictures.bars("peak memory of each device", groups, "MB")
        assert png is not None, "there are devices"
        images["memory"] = png
        parts.append(markup.picture(png, "Bars of the peak memory of each device; the values are in the table above."))
    else:
        parts.append(element("p", SHARED_MEMORY, class_="note"))
    return parts, images


def _events(run: RecordedRun) -> Iterable[Markup]:
    lost = events.lost_ends(run.events)
    rows = [
        (
            event.time,
            _EVENTS.get(event.kind, event.kind) + (", and killed or crashed" if event in lost else ""),
            "" if event.step is None else f"{event.step:,}",
            event.detail,
        )
        for event in run.events[-MOST_EVENTS:]
    ]
    if not rows:
        yield element("p", "None is recorded.")
        return
    resumed = sum(event.kind == events.RESUMED for event in run.events)
    failed = sum(event.kind == events.FAILED for event in run.events) + len(lost)
    yield element("p", f"Resumptions: {resumed}. Failures: {failed}.")
    yield markup.table("What happened", ["time, UTC", "event", "step", "detail"], rows, numbers=False)


def _parity(run: RecordedRun) -> Iterable[Markup]:
    every = run.settings.get("callbacks.check_replicas_every_steps")
    if is_number(every):
        end = "no difference was found" if run.status == "trained" else "a difference would be a failure above"
        yield element("p", f"The weights of all replicas were compared every {every} steps: {end}.")
    parity = run.parity
    if not parity:
        yield element(
            "p",
            "No check of parity was saved here. tfpar.check_parity(...).save(folder / 'parity.json') saves one, and "
            "python -m tfpar.report writes this page again.",
        )
        return
    verdict = "equal to one device" if parity.get("equal") is True else "NOT equal to one device"
    tolerance = parity.get("tolerance")
    within = f", tolerance {tolerance:g}" if is_number(tolerance) else ""
    conditions = f" {parity['conditions']}" if parity.get("conditions") else ""
    steps = f"after {parity.get('num_steps')} steps"
    yield element("p", f"{parity.get('strategy')}: {verdict} {steps}{within}{conditions}.")
    rows = [
        (row.get("name"), *(_tiny(row.get(f"after_{step}_step")) for step in ("first", "last")))
        for part in ("weights", "logs")
        for row in _tables(parity.get(part))
    ]
    yield markup.table("Relative differences", ["weight or log", "first step", "last step"], rows[:MOST_LAYERS])


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _tiny(value: Any) -> str:
    return f"{value:.1e}" if is_number(value) and value == value else ""


def _model(run: RecordedRun) -> Iterable[Markup]:
    model, layout = run.table("model"), run.table("layout")
    facts = [(name, model.get(name)) for name in ("name", "parameters", "precision", "optimizer", "data")]
    facts += [(name, layout.get(name)) for name in ("strategy", "batch")]
    shown = [(name, f"{value:,}" if is_number(value) else value) for name, value in facts if value not in (None, "")]
    if not shown:
        yield element("p", "Not recorded.")
        return
    yield markup.table("Model and layout", ["", "value"], shown, numbers=False)
    if table := layout.get("stages"):
        yield element("h3", "Stages")
        yield element("pre", table)
    layers = run.rows("model", "layers")
    rows = [
        (row.get("name"), row.get("class"), row.get("shape") or "", _value(row.get("parameters"))) for row in layers
    ]
    if rows:
        title = (
            f"Layers ({len(rows):,})"
            if len(rows) <= MOST_LAYERS
            else f"The first {MOST_LAYERS} of {len(rows):,} layers"
        )
        heads = ["layer", "class", "output", "parameters"]
        yield element(
            "details",
            element("summary", title),
            markup.table("Layers", heads, rows[:MOST_LAYERS], numbers=False),
            **({"open": "open"} if len(rows) <= 30 else {}),
        )


def _configuration(run: RecordedRun) -> Iterable[Markup]:
    facts = {**run.table("versions"), **run.table("machine")}
    rows = [
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in facts.items()
    ]
    yield markup.table("Environment of the last process", ["", "value"], rows, numbers=False)
    rows = [(key, element("code", show(value))) for key, value in run.settings.items()]
    yield markup.table("Settings", ["setting", "value"], rows, numbers=False)


def show(value: Any) -> str:
    """Return the value of a setting as TOML; as Python where TOML has none.

    Args:
        value: The value.
    """
    try:
        return toml.show(value)
    except (TypeError, ValueError):
        return str(value)


def shown(value: str) -> str:
    """Return a text for a terminal, with unprintable characters escaped.

    Args:
        value: The text.
    """
    return excerpt(value, 400)
