"""The memory of logical CPUs, which share one memory, at any time of a predicted step.

                              .:.
                            .::::::.       its activations are recomputed in B and freed one by one
bytes  .............................
       F                   B
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tfpar.engines.preview import Preview
from tfpar.pipeline.schedule import Action

Corner = tuple[float, float]  # seconds, bytes


def together_bytes(preview: Preview) -> float:
    """Return the largest number of bytes of activations on all devices together at one time.

    `Timeline.peak_bytes` has the peak of each device, and devices have their peaks at different times. The recomputed
    activations of a backward pass grow until the forward pass has run again, and then shrink.

    Args:
        preview: Of a pipeline, for a schedule without W.
    """
    forms = list(_forms(preview))
    moments = {seconds for form in forms for seconds, _ in form}
    return max(sum(_height(form, moment) for form in forms) for moment in moments)


def _forms(preview: Preview) -> Iterator[list[Corner]]:
    """Draw what each micro-batch holds on each stage, as a line from corner to corner."""
    durations = preview.durations
    times = {span.action: (span.begin_seconds, span.end_seconds) for span in preview.planned.spans}
    for kind, stage, microbatch in times:
        if kind == "F":
            kept_bytes, again_bytes = durations.activation_bytes[stage], durations.backward_temporary_bytes[stage]
            (begin, _), (again, end) = times[Action("F", stage, microbatch)], times[Action("B", stage, microbatch)]
            turn = min(again + durations.forward_seconds[stage], end)
            yield [(begin, kept_bytes), (again, kept_bytes), (turn, kept_bytes + again_bytes), (end, kept_bytes)]


def _height(form: list[Corner], seconds: float) -> float:
    """Return how high a line is at a time; it ends before its last corner."""
    for (left, low), (right, high) in itertools.pairwise(form):
        if left <= seconds < right:
            return low + (high - low) * (seconds - left) / (right - left)
    return 0.0
