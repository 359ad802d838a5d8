"""The stages of a pipeline as a table, and its schedule in words; no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import rich.box
import rich.table

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.simulate import Timeline


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


def stages_table(rows: Sequence[StageRow], planned: Timeline | None, schedule: Schedule) -> rich.table.Table:
    """Return the stages of a pipeline as a table for `rich.print`; it folds layer names on a narrow terminal.

    Args:
        rows: One a stage.
        planned: What `simulate` predicts; None if no times are known.
        schedule: What the pipeline follows.
    """
    table = rich.table.Table(
        title=describe_schedule(schedule),
        caption="" if planned is None else f"predicted: {describe_step(planned)}",
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    table.add_column("layers", overflow="fold")
    for name in ("parameters", "forward\nms", "backward\nms", "memory", "to next"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.stage),
            row.device,
            f"{row.num_layers}: {row.first_layer}" + (f"\n... {row.last_layer}" if row.num_layers > 1 else ""),
            f"{row.num_parameters:,}",
            "" if row.forward_seconds is None else _milliseconds(row.forward_seconds),
            "" if row.backward_seconds is None else _milliseconds(row.backward_seconds),
            _bytes(row.memory_bytes),
            _bytes(row.cut_bytes),
        )
    return table


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
    return f"step {_milliseconds(timeline.step_seconds)} ms, bubble {100 * timeline.bubble:.1f} %"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _milliseconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    milliseconds = 1e3 * seconds
    decimals = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:,.{decimals}f}"


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} B"
