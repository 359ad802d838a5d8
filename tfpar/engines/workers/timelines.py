"""The timelines of a step on several workers as one, of a grid of all their replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.simulator import Span, Timeline


def to_bytes(timeline: Timeline) -> bytes:
    """Return a measured timeline as bytes, for the other workers.

    Args:
        timeline: The timeline.
    """
    return json.dumps([timeline.num_devices, timeline.spans, timeline.step_seconds]).encode()


def from_bytes(blob: bytes) -> Timeline:
    """Return the timeline of `to_bytes`.

    Args:
        blob: The bytes.

    Example:
        >>> timeline = Timeline(1, (Span(Action("F", 0, 0), 0, 0.0, 0.5),), 0.5, ())
        >>> from_bytes(to_bytes(timeline)) == timeline
        True
    """
    num_devices, spans, step_seconds = json.loads(blob)
    return Timeline(num_devices, tuple(Span(Action(*one[0]), *one[1:]) for one in spans), step_seconds, ())


def joined(timelines: Sequence[Timeline], num_microbatches: int) -> Timeline:
    """Return the timelines of workers as one, each from the start of its own first action.

    Args:
        timelines: One for each worker, by rank.
        num_microbatches: Number of micro-batches of a worker.
    """
    size = timelines[0].num_devices
    spans = [
        span._replace(
            action=span.action._replace(microbatch=span.action.microbatch + rank * num_microbatches),
            device=span.device + rank * size,
        )
        for rank, timeline in enumerate(timelines)
        for span in timeline.spans
    ]
    spans.sort(key=lambda span: span.begin_seconds)
    return Timeline(size * len(timelines), tuple(spans), max(one.step_seconds for one in timelines), ())
