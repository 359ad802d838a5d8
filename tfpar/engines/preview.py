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
    """A row of the table, for one device with the whole model.

    Attributes:
        device: The name of the device.
        num_examples: The examples of its largest per-replica batch.
        num_parameters: The parameters of its weights, untrained weights included.
        state_bytes: Bytes of weights, gradients and optimizer state; activations are not included.
        gradient_bytes: Bytes of the gradients, which are all-reduced in every step.
    """

    device: str
    num_examples: int
    num_parameters: int
    state_bytes: int
    gradient_bytes: int


@dataclasses.dataclass(frozen=True)
class Preview:
    """The result of `Trainer.preview`; a notebook shows text and picture, `print` shows text.

    Attributes:
        table: The devices or stages, as lines of text.
        rows: The same as data, one row a stage, or one a device with the whole model.
        planned: The predicted times of the actions of a pipeline's step, the optimizer included; None for other
            strategies.
        schedule: The schedule of a pipeline; None for other strategies.
        durations: The measured time of each action of a pipeline; None for other strategies.

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
        """Write the picture of a pipeline's step.

        Args:
            path: A `.png` file in a folder that exists.

        Raises:
            ValueError: If the name ends otherwise, or the strategy has no schedule to draw.
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
        """Return the table, which an interactive session shows."""
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
    """Return the table of devices that have the whole model.

    Args:
        title: The first line.
        rows: One row a device of this process.
        num_replicas: Replicas of all workers together.
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
