"""The step of each layout, predicted or measured. Pure Python."""

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
            "weights" (their arrival), "data", "reading data" (on the cores of the devices).
        memory_bytes: Peak memory of the fullest device, runtime included.
        largest_batch: The largest global batch that fits in the memory of a device; None without a limit.
        measured_seconds: Its duration in a measurement; None where it is predicted only.
        spread: Relative spread of the repeats of that measurement.
        ran_out_of_memory: Whether it did not fit in the memory of the devices when it was measured.
        forward_seconds: Seconds of its forward pass; None for a pipeline.
    """

    layout: Layout
    seconds: float
    waits: dict[str, float]
    memory_bytes: int = 0
    largest_batch: int | None = None
    measured_seconds: float | None = None
    spread: float = 0.0
    ran_out_of_memory: bool = False
    forward_seconds: float | None = None

    @property
    def known_seconds(self) -> float:
        """The measured duration, or else the predicted one."""
        return self.seconds if self.measured_seconds is None else self.measured_seconds
