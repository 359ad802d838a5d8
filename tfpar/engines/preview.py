"""A preview of a step before training: a table, and for a pipeline a picture of its schedule."""

from __future__ import annotations

import dataclasses
import functools
import html
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from tfpar.files import atomic_file
from tfpar.messages.number_format import three_digits

if TYPE_CHECKING:
    from tfpar.pipeline.analysis.stage_table import StageRow
    from tfpar.pipeline.schedule import Schedule
    from tfpar.pipeline.schedule.simulator import Durations, Timeline


@dataclasses.dataclass(frozen=True)
class ReplicaRow:
    """A row of the table, for a device of a replica.

    Attributes:
        device: Name of the device.
        num_examples: Examples in its largest per-replica batch.
        num_parameters: Parameters on the device, including non-trainable ones.
        state_bytes: Bytes of weights, gradients and optimizer state, without activations.
        gradient_bytes: Bytes of gradients summed over the replicas in every step.
    """

    device: str
    num_examples: int
    num_parameters: int
    state_bytes: int
    gradient_bytes: int


@dataclasses.dataclass(frozen=True)
class Preview:
    """The result of `Trainer.preview`: a table and, for a pipeline, a picture of its schedule.

    `print` shows the table, and a notebook also shows the picture.

    Attributes:
        table: The devices or stages as text.
        rows: The table as data, with a row per stage or device.
        planned: Predicted timeline of a pipeline's step, including the optimizer; None for other strategies.
        schedule: Schedule of a pipeline; None for other strategies.
        durations: Measured durations of a pipeline's actions; None for other strategies.

    Example:
        >>> preview = trainer.preview(dataset)
        >>> print(preview)
        >>> preview.planned.step_seconds > 0, 0 < preview.planned.bubble < 1
        (True, True)
        >>> preview.save("schedule.png")
    """

    table: str
    rows: tuple[StageRow, ...] | tuple[ReplicaRow, ...]
    planned: Timeline | None = None
    schedule: Schedule | None = None
    durations: Durations | None = None

    def save(self, path: str | Path) -> None:
        """Write the picture of a pipeline's schedule.

        Args:
            path: A `.png` file in an existing folder.

        Raises:
            ValueError: If the path does not end with `.png`, or the strategy has no schedule.
            OSError: If the file cannot be written.
        """
        if Path(path).suffix != ".png":
            raise ValueError(f"The path must end with .png, received {str(path)!r}. Name it {Path(path).stem}.png.")
        if self._picture is None:
            raise ValueError("Only a pipeline has a schedule to draw. Print the preview: its table is text.")
        atomic_file.write(Path(path), self._picture)

    @functools.cached_property
    def _picture(self) -> bytes | None:
        if self.planned is None or self.schedule is None:
            return None
        from tfpar.pipeline.analysis import timeline_plot

        return timeline_plot.draw(self.planned, None, self.schedule, None)

    def __repr__(self) -> str:
        """Return the table, for interactive sessions."""
        return self.table

    def _repr_html_(self) -> str:
        text = f"<pre>{html.escape(self.table)}</pre>"
        if self._picture is None:
            return text
        picture = b64encode(self._picture).decode()
        return f'{text}<img alt="schedule" style="max-width: 100%" src="data:image/png;base64,{picture}">'

    def _repr_png_(self) -> bytes | None:
        return self._picture


def replicas_table(title: str, rows: tuple[ReplicaRow, ...], num_replicas: int) -> str:
    """Format a preview with a row per device.

    Args:
        title: First line of the table.
        rows: A row per device of this process.
        num_replicas: Number of replicas, on all workers together.
    """
    width = max(len(name) for name in ("device", *(row.device for row in rows)))
    lines = [title, f"{'device':<{width}}  examples  parameters  state MB"]
    lines += [
        f"{row.device:<{width}}  {row.num_examples:>8,}  {row.num_parameters:>10,}  "
        f"{three_digits(row.state_bytes / 1e6):>8}"
        for row in rows
    ]
    lines += ["", "examples are at most those of a step, state is weights, gradients and optimizer"]
    if num_replicas > 1:
        lines.append(f"{three_digits(rows[0].gradient_bytes / 1e6)} MB of gradients are summed in every step")
    return "\n".join(lines)
