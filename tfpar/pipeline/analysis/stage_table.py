"""The stages of a pipeline as a table, and descriptions of schedules and steps. No TensorFlow."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from tfpar.messages.number_format import line, three_digits
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.simulator import Timeline

_GAP = "  "
_DEVICE_COLUMNS = 17  # in a table of 80 columns
_TITLE_COLUMNS = 76  # the launcher prefixes the rank


@dataclasses.dataclass(frozen=True)
class StageRow:
    """One row of the table: the layers, times and memory of a stage.

    Attributes:
        stage: Index of the stage.
        device: Names of its devices, separated by spaces.
        first_layer: Name of its first layer call.
        last_layer: Name of its last layer call.
        num_layers: Number of its layer calls.
        num_parameters: Number of its parameters, including frozen ones.
        forward_seconds: Duration of the forward pass of a full micro-batch; None if unknown.
        backward_seconds: Duration of the complete backward pass of a full micro-batch; None if unknown.
        memory_bytes: Bytes of weights, gradients, optimizer state and activations; None if unknown.
        cut_bytes: Bytes of a full micro-batch across the cut after the stage; None if unknown, or for the last stage.

    Example:
        >>> StageRow(0, "GPU:0", "embedding", "block_3", 12, 1000, None, None, None, cut_bytes=512).num_layers
        12
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


def stages_table(
    rows: Sequence[StageRow],
    planned: Timeline | None,
    schedule: Schedule,
    included: Sequence[str] = ("the optimizer",),
    not_measured: Sequence[str] = (),
    between_workers: str | None = None,
    num_workers: int = 1,
    num_shards: int = 1,
    notes: Sequence[str] = (),
) -> str:
    """Format the stages of a pipeline as a table, with the layers of each stage on a separate line.

    Args:
        rows: One row for each stage.
        planned: The simulated step; None if the times are unknown.
        schedule: The schedule of the pipeline.
        included: Descriptions of what the step includes besides the actions; at least one.
        not_measured: Descriptions of what the step does not include.
        between_workers: Description of the traffic between workers; None for one worker.
        num_workers: Number of workers with such a pipeline each.
        num_shards: Number of devices of a stage.
        notes: Lines below the table.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> row = StageRow(0, "GPU:0", "first", "last", 12, 1000, None, None, None, None)
        >>> print(stages_table([row], None, make("1f1b", num_stages=1, num_microbatches=2)))
        1f1b: 1 stage on 1 device, 2 micro-batches
                                           forward  backward  memory  to next
        stage  device  layers  parameters       ms        ms      MB       MB
            0  GPU:0       12       1,000
               first ... last
    """
    names = [_shortened(row.device) for row in rows]
    device_columns = max(map(len, ["device", *names]))
    columns = (5, device_columns, 6, 10, 7, 8, 6, 7)
    lines = [
        *_title(describe_schedule(schedule, num_shards), num_workers),
        _cells(columns, ("", "", "", "", "forward", "backward", "memory", "to next")),
        _cells(columns, ("stage", "device", "layers", "parameters", "ms", "ms", "MB", "MB")),
    ]
    indent = " " * (columns[0] + len(_GAP))
    for row, name in zip(rows, names, strict=True):
        cells = (
            str(row.stage),
            name,
            f"{row.num_layers:,}",
            f"{row.num_parameters:,}",
            "" if row.forward_seconds is None else three_digits(1e3 * row.forward_seconds),
            "" if row.backward_seconds is None else three_digits(1e3 * row.backward_seconds),
            "" if row.memory_bytes is None else three_digits(row.memory_bytes / 1e6),
            "" if row.cut_bytes is None else three_digits(row.cut_bytes / 1e6),
        )
        lines.append(_cells(columns, cells))
        if name != row.device:
            lines.append(line("", row.device, len(indent)))
        last = [] if row.num_layers == 1 else [f"... {row.last_layer}"]
        one_line = " ".join([row.first_layer, *last])
        lines += [f"{indent}{name}" for name in ([one_line] if len(one_line) < 70 else [row.first_layer, *last])]
    lines += ["", *notes] if notes else []
    if between_workers is not None:
        lines += ["", line("network", between_workers)]
    if planned is not None:
        text = f"{describe_step(planned)}: from the times above, {' and '.join(included)} included"
        missing = f"; {' and '.join(not_measured)} not measured" if not_measured else ""
        lines += [*[""] * (between_workers is None), line("predicted", text + missing)]
    return "\n".join(lines)


def _title(described: str, num_workers: int) -> list[str]:
    text = f"{described}, on each of {num_workers} workers" if num_workers > 1 else described
    return textwrap.wrap(text, _TITLE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _shortened(devices: str) -> str:
    """Abbreviate a long list of devices, which the table repeats on a separate line."""
    first, _, others = devices.partition(" ")
    return devices if len(devices) <= _DEVICE_COLUMNS else f"{first}, {1 + others.count(' ')} more"


def _cells(columns: Sequence[int], cells: Sequence[str]) -> str:
    """Return a line of right-aligned cells; the second cell, the device, is left-aligned."""
    aligned = [
        f"{cell:<{width}}" if index == 1 else f"{cell:>{width}}"
        for index, (width, cell) in enumerate(zip(columns, cells, strict=True))
    ]
    return _GAP.join(aligned).rstrip()


def describe_schedule(schedule: Schedule, num_shards: int = 1) -> str:
    """Describe a schedule by its name and size.

    Args:
        schedule: The schedule.
        num_shards: Number of devices of a stage.

    Example:
        >>> from tfpar.pipeline.schedule import make
        >>> describe_schedule(make("1f1b", num_stages=2, num_microbatches=8))
        '1f1b: 2 stages on 2 devices, 8 micro-batches'
    """
    stages, devices = _count(schedule.num_stages, "stage"), _count(len(schedule.actions) * num_shards, "device")
    microbatches = _count(schedule.num_microbatches, "micro-batch", "es")
    replicas = f"{schedule.num_replicas} replicas of " * (schedule.num_replicas > 1)
    shards = f" of {num_shards} shards" * (num_shards > 1)
    return f"{schedule.name}: {replicas}{stages}{shards} on {devices}, {microbatches}"


def describe_step(timeline: Timeline) -> str:
    """Describe a predicted or measured step by its time and its bubble.

    Example:
        >>> describe_step(Timeline(num_devices=1, spans=(), step_seconds=0.015, peak_bytes=()))
        'step 15.0 ms, bubble 100.0 %'
    """
    return f"step {three_digits(1e3 * timeline.step_seconds)} ms, bubble {100 * timeline.bubble:.1f} %"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
