"""The stages of a pipeline as a table, and its schedule in words; no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.messages.number_format import line, three_digits
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.simulator import Timeline

_GAP = "  "


@dataclasses.dataclass(frozen=True)
class StageRow:
    """What the table says of one stage.

    Attributes:
        stage: Its number, from 0.
        device: What its device is called.
        first_layer: Name of its first layer call.
        last_layer: Name of its last one.
        num_layers: How many layer calls it has.
        num_parameters: In its weights, the untrained ones included.
        forward_seconds: Of a full micro-batch; None if not known.
        backward_seconds: Of a full micro-batch, for inputs and weights; None if not known.
        memory_bytes: Of its weights, gradients, optimizer state and activations; None if not known.
        cut_bytes: What a full micro-batch carries across the cut behind it; None if not known, or for the last stage.
    """

    stage: int
    device: str
    first_layer: str
    last_layer: str
    num_layers: int
    num_parameters: int
    forward_seconds: float | None
    backward_seconds: float | None
    memory_bytes: int | None
    cut_bytes: int | None


def stages_table(rows: Sequence[StageRow], planned: Timeline | None, schedule: Schedule) -> str:
    """Return the stages of a pipeline as lines of text, with the layers of each on a line of their own.

    Args:
        rows: One a stage.
        planned: What `simulate` predicts; None if no times are known.
        schedule: What the pipeline follows.
    """
    device_columns = max(len(name) for name in ("device", *(row.device for row in rows)))
    columns = (5, device_columns, 6, 10, 7, 8, 6, 7)
    lines = [
        describe_schedule(schedule),
        _cells(columns, ("", "", "", "", "forward", "backward", "memory", "to next")),
        _cells(columns, ("stage", "device", "layers", "parameters", "ms", "ms", "MB", "MB")),
    ]
    indent = " " * (columns[0] + len(_GAP))
    for row in rows:
        cells = (
            str(row.stage),
            row.device,
            f"{row.num_layers:,}",
            f"{row.num_parameters:,}",
            "" if row.forward_seconds is None else three_digits(1e3 * row.forward_seconds),
            "" if row.backward_seconds is None else three_digits(1e3 * row.backward_seconds),
            "" if row.memory_bytes is None else three_digits(row.memory_bytes / 1e6),
            "" if row.cut_bytes is None else three_digits(row.cut_bytes / 1e6),
        )
        lines.append(_cells(columns, cells))
        last = [] if row.num_layers == 1 else [f"... {row.last_layer}"]
        together = " ".join([row.first_layer, *last])
        lines += [f"{indent}{name}" for name in ([together] if len(together) < 70 else [row.first_layer, *last])]
    if planned is not None:
        lines += ["", line("predicted", f"{describe_step(planned)}: from the times above, the optimizer included")]
    return "\n".join(lines)


def _cells(columns: Sequence[int], cells: Sequence[str]) -> str:
    """Return a line of cells that are aligned to the right; the device, the second, to the left."""
    aligned = [
        f"{cell:<{width}}" if index == 1 else f"{cell:>{width}}"
        for index, (width, cell) in enumerate(zip(columns, cells, strict=True))
    ]
    return _GAP.join(aligned).rstrip()


def describe_schedule(schedule: Schedule) -> str:
    """Return a schedule's name and numbers in words.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> describe_schedule(make("1f1b", num_stages=2, num_microbatches=8))
        '1f1b: 2 stages on 2 devices, 8 micro-batches'
    """
    stages, devices = _count(schedule.num_stages, "stage"), _count(schedule.num_devices, "device")
    microbatches = _count(schedule.num_microbatches, "micro-batch", "es")
    return f"{schedule.name}: {stages} on {devices}, {microbatches}"


def describe_step(timeline: Timeline) -> str:
    """Return the step time and the bubble in words, such as "step 15 ms, bubble 20.0 %"."""
    return f"step {three_digits(1e3 * timeline.step_seconds)} ms, bubble {100 * timeline.bubble:.1f} %"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
