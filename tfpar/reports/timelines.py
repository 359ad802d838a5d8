"""Conversion of pipeline schedules, timelines and durations to JSON values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfpar.pipeline.schedule import Action, Schedule, parse
from tfpar.pipeline.schedule.simulator import Durations, Span, Timeline

MOST_SPANS = 20_000  # more are not visible in a figure


@dataclasses.dataclass(frozen=True)
class PipelineRecord:
    """A step of a pipeline, as planned and, if measured, as run.

    Args:
        schedule: The order of the actions.
        planned: The simulated step.
        measured: The measured step; None without `--trace`.
        durations: The measured durations of the actions that were simulated.
    """

    schedule: Schedule
    planned: Timeline
    measured: Timeline | None
    durations: Durations | None


def to_table(record: PipelineRecord) -> dict[str, Any]:
    """Convert a record to JSON values."""
    return {
        "schedule": record.schedule.to_text(),
        "planned": _from_timeline(record.planned),
        "measured": None if record.measured is None else _from_timeline(record.measured),
        "durations": None if record.durations is None else dataclasses.asdict(record.durations),
    }


def _from_timeline(timeline: Timeline) -> dict[str, Any]:
    spans = [[*span.action, span.device, span.begin_seconds, span.end_seconds] for span in timeline.spans]
    return {**dataclasses.asdict(dataclasses.replace(timeline, spans=())), "spans": spans}


def from_table(table: Any) -> PipelineRecord | None:
    """Convert JSON values from `to_table` to a record; return None if they are invalid.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> from tfpar.pipeline.schedule.simulator import simulate
        >>> durations = Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.1,))
        >>> schedule = make("1f1b", num_stages=2, num_microbatches=4)
        >>> record = PipelineRecord(schedule, simulate(schedule, durations), None, durations)
        >>> from_table(to_table(record)) == record
        True
        >>> from_table({"schedule": "no"}) is None
        True
    """
    try:
        measured = table.get("measured")
        return PipelineRecord(
            parse(table["schedule"]),
            _to_timeline(table["planned"]),
            None if measured is None else _to_timeline(measured),
            _to_durations(table.get("durations")),
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def _to_timeline(table: Mapping[str, Any]) -> Timeline:
    spans = tuple(
        Span(Action(kind, int(stage), int(microbatch)), int(device), float(begin), float(end))
        for kind, stage, microbatch, device, begin, end in table["spans"]
    )
    return Timeline(int(table["num_devices"]), spans, float(table["step_seconds"]), tuple(table["peak_bytes"]))


def _to_durations(table: Mapping[str, Any] | None) -> Durations | None:
    return None if table is None else Durations(**{name: tuple(values) for name, values in table.items()})
