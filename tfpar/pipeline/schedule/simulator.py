"""When each action of a schedule runs, given how long actions and transfers take; pure Python.

It predicts a step before it runs: its time, the share of it in which devices wait, the memory of each device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule import Action, Kind, Schedule


@dataclasses.dataclass(frozen=True)
class Durations:
    """How long the actions of each stage take on one full micro-batch, and what they keep.

    One entry a stage, if nothing else is said.

    Attributes:
        forward_seconds: Of F.
        backward_seconds: Of B where it is the whole backward. Not read for a schedule with W.
        input_gradient_seconds: Of B where the schedule has W. Not read otherwise.
        weight_gradient_seconds: Of W. Not read otherwise.
        transfer_seconds: One way across the cut behind each stage but the last: `num_stages - 1` entries.
        update_seconds: Of the optimizer, which begins when all actions of the step have ended. () for none.
        activation_bytes: What one micro-batch keeps from the beginning of its F to the end of its W, or of its B where
            there is no W. () for nothing.
        backward_bytes: What is there besides while its B runs: activations that recomputation makes again. () for
            nothing.
        weight_gradient_bytes: The same while its W runs. () for nothing.
        waiting_bytes: What it keeps besides from the end of its B to the end of its W. () for nothing.
        fixed_bytes: Weights, gradients, optimizer state. () for nothing.
        microbatch_scale: One entry a micro-batch: its size, where 1 is a full one. Times, transfers and activations
            are in proportion. () for full ones; (1, 1, 1, 0.5) for a smaller last one.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()
    weight_gradient_bytes: tuple[int, ...] = ()
    waiting_bytes: tuple[int, ...] = ()
    fixed_bytes: tuple[int, ...] = ()
    microbatch_scale: tuple[float, ...] = ()


class Span(NamedTuple):
    """When one action ran, in seconds from the beginning of the step."""

    action: Action
    device: int
    begin_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When everything in one step ran, as predicted or as measured.

    Attributes:
        num_devices: Devices.
        spans: Every action, in the order in which they begin.
        step_seconds: From the beginning of the first action to the end of the step, the optimizer included.
        peak_bytes: For each device, the most memory at any time.
    """

    num_devices: int
    spans: tuple[Span, ...]
    step_seconds: float
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which no action runs, from 0 to 1."""
        busy_seconds = sum(span.end_seconds - span.begin_seconds for span in self.spans)
        return 1 - busy_seconds / (self.num_devices * self.step_seconds) if self.step_seconds else 0.0


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Return when each action runs, exactly: the longest path through the schedule.

    An action begins when its device has ended the action before and its input has arrived. Transfers take no time of a
    device, begin when their tensor is ready and do not delay each other; within a device there is none.

    Args:
        schedule: One that `schedule.check` accepts.
        durations: Of its stages and cuts.

    Raises:
        ValueError: If `durations` do not fit the schedule, or a device would wait for ever.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> equal = Durations((1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0), transfer_seconds=(0.0,))
        >>> timeline = simulate(schedule.make("1f1b", num_stages=2, num_microbatches=4), equal)
        >>> timeline.step_seconds, round(timeline.bubble, 9)
        (15.0, 0.2)
    """
    _check(schedule, durations)
    seconds = _seconds_of(schedule, durations)
    scale = _scale(schedule, durations)
    spans: dict[Action, Span] = {}
    free_seconds = [0.0] * schedule.num_devices
    for action in schedule.in_order():
        device = schedule.device_of(action.stage)
        begin_seconds = free_seconds[device]
        for needed in schedule.needs(action):
            arrival_seconds = spans[needed].end_seconds
            if schedule.device_of(needed.stage) != device:
                cut = min(needed.stage, action.stage)
                arrival_seconds += durations.transfer_seconds[cut] * scale[action.microbatch]
            begin_seconds = max(begin_seconds, arrival_seconds)
        end_seconds = begin_seconds + seconds[action.kind][action.stage] * scale[action.microbatch]
        spans[action] = Span(action, device, begin_seconds, end_seconds)
        free_seconds[device] = end_seconds
    update_seconds = max(_sum_per_device(schedule, durations.update_seconds))
    return Timeline(
        schedule.num_devices,
        tuple(sorted(spans.values(), key=lambda span: (span.begin_seconds, span.device))),
        max(free_seconds) + update_seconds,
        tuple(
            peak_bytes(schedule, durations, range(device, schedule.num_stages, schedule.num_devices))
            for device in range(schedule.num_devices)
        ),
    )


def _seconds_of(schedule: Schedule, durations: Durations) -> dict[Kind, Sequence[float]]:
    if schedule.splits_backward:
        backward = durations.input_gradient_seconds
    else:
        backward = durations.backward_seconds
    return {"F": durations.forward_seconds, "B": backward, "W": durations.weight_gradient_seconds}


def _scale(schedule: Schedule, durations: Durations) -> Sequence[float]:
    return durations.microbatch_scale or (1.0,) * schedule.num_microbatches


def _sum_per_device(schedule: Schedule, of_stage: Sequence[float]) -> list[float]:
    return [sum(of_stage[device :: schedule.num_devices]) for device in range(schedule.num_devices)]


def peak_bytes(schedule: Schedule, durations: Durations, stages: Collection[int]) -> int:
    """Return the most memory that some stages of one device hold at once; the order alone decides, no times.

    Args:
        schedule: The order of actions.
        durations: What they keep.
        stages: Numbers of stages.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> sizes = Durations((), (), (), (), (), activation_bytes=(100, 10), fixed_bytes=(7, 3))
        >>> peak_bytes(schedule.make("1f1b", num_stages=2, num_microbatches=8), sizes, stages=[0])
        207
    """
    none, scale, splits = (0,) * schedule.num_stages, _scale(schedule, durations), schedule.splits_backward
    activation_bytes = durations.activation_bytes or none
    waiting_bytes = (splits and durations.waiting_bytes) or none
    beside_bytes = {"F": none, "B": durations.backward_bytes or none, "W": durations.weight_gradient_bytes or none}
    peak = kept = float(sum((durations.fixed_bytes or none)[stage] for stage in stages))
    device = schedule.device_of(next(iter(stages)))
    for kind, stage, microbatch in schedule.actions[device]:
        if stage not in stages:
            continue
        size = scale[microbatch]
        kept += size * activation_bytes[stage] * (kind == "F")
        peak = max(peak, kept + size * beside_bytes[kind][stage])
        kept += size * waiting_bytes[stage] * (kind == "B")
        peak = max(peak, kept)
        if kind == ("W" if splits else "B"):
            kept -= size * (activation_bytes[stage] + waiting_bytes[stage])
    return math.ceil(peak)


def _check(schedule: Schedule, durations: Durations) -> None:
    backward = ("input_gradient_seconds", "weight_gradient_seconds")
    needed = ("forward_seconds", *(backward if schedule.splits_backward else ("backward_seconds",)))
    _check_entries(durations, needed, schedule.num_stages, "stages")
    _check_entries(durations, ("transfer_seconds",), schedule.num_stages - 1, "cuts")
    sizes = [field.name for field in dataclasses.fields(durations) if field.name.endswith("_bytes")]
    optional = ("update_seconds", *sizes)
    _check_entries(durations, [name for name in optional if getattr(durations, name)], schedule.num_stages, "stages")
    if durations.microbatch_scale:
        _check_entries(durations, ("microbatch_scale",), schedule.num_microbatches, "micro-batches")


def _check_entries(durations: Durations, names: Sequence[str], number: int, of_what: str) -> None:
    for name in names:
        entries = getattr(durations, name)
        if len(entries) != number:
            raise ValueError(
                f"Durations.{name} must have an entry for each of {number} {of_what}, and it has {len(entries)}: "
                f"{entries}. Give one for each."
            )
        if not all(0 <= entry < math.inf for entry in entries):
            raise ValueError(
                f"Durations.{name} must be finite and not negative, and it is {entries}. Measure it again."
            )
