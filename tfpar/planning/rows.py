"""The predicted step of each layout. Pure Python."""

from __future__ import annotations

import dataclasses

from tfpar.planning.layouts import Layout


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """The predicted step of a layout.

    Args:
        layout: The layout.
        seconds: Its duration.
        waits: Seconds in which a device does not compute, by reason: "bubble", "all-reduce", "transfers", "update",
            "weights" (their arrival), "data".
        memory_bytes: Peak memory of the fullest device, runtime included.
        largest_batch: The largest global batch that fits in the memory of a device; None without a limit.
    """

    layout: Layout
    seconds: float
    waits: dict[str, float]
    memory_bytes: int = 0
    largest_batch: int | None = None
