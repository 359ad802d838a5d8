"""Simulation of a schedule: the start and end of each action, the bubble, and the peak memory of each device.

Pure Python.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule import Action, Kind, Schedule


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds and bytes of the actions of one full micro-batch.

    Tuples have one entry for each stage, unless stated otherwise. Optional tuples may be empty, which means zeros.

    Attributes:
        forward_seconds: Duration of F.
        backward_seconds: Duration of B in schedules without W.
        input_gradient_seconds: Duration of B in schedules with W.
        weight_gradient_seconds: Duration of W.
        transfer_seconds: Duration of a transfer in either direction across each cut, `num_stages - 1` entries.
        update_seconds: Duration of the optimizer's update, after the last action of the step.
        reduction_seconds: Duration of the sum of gradients over replicas, after the last action of the stage on all
            replicas.
        all_reduce_seconds: Duration of the all-reduce of gradients over workers, after the sum over replicas. Stages
            take turns on the workers' link.
        activation_bytes: Saved tensors of a micro-batch, from the start of F to the end of its backward pass.
        backward_temporary_bytes: Temporary memory of B, for recomputed activations.
        weight_gradient_temporary_bytes: Temporary memory of W.
        until_weight_gradient_bytes: Bytes saved from the end of B to the end of W, besides the activations.
        fixed_bytes: Weights, gradients and optimizer state.
        microbatch_scale: Size of each micro-batch relative to a full one, one entry for each micro-batch. Durations of
            actions and transfers, and bytes of activations, are proportional to it. Empty if all micro-batches are
            full; (1, 1, 1, 0.5) if the last of four is half as large.

    Example:
        >>> two_stages = Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.1,))
        >>> two_stages.backward_seconds
        (2.0, 2.0)
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    reduction_seconds: tuple[float, ...] = ()
    all_reduce_seconds: tuple[float, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    backward_temporary_bytes: tuple[int, ...] = ()
    weight_gradient_temporary_bytes: tuple[int, ...] = ()
    until_weight_gradient_bytes: tuple[int, ...] = ()
    fixed_bytes: tuple[int, ...] = ()
    microbatch_scale: tuple[float, ...] = ()


def microbatch_scale(num_examples: int, num_microbatches: int) -> tuple[float, ...]:
    """Return the size of each micro-batch relative to the largest, for `Durations.microbatch_scale`.

    Args:
        num_examples: Number of examples in the batch, at least 1.
        num_microbatches: Number of micro-batches. Their sizes differ by at most one, and none is empty.

    Example:
        >>> microbatch_scale(7, 4)
        (1.0, 1.0, 1.0, 0.5)
    """
    ends = [-(-number * num_examples // num_microbatches) for number in range(num_microbatches + 1)]
    sizes = [max(1, end - begin) for begin, end in itertools.pairwise(ends)]
    return tuple(size / max(sizes) for size in sizes)


class Span(NamedTuple):
    """The start and end of one action, in seconds since the start of the step."""

    action: Action
    device: int
    begin_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The predicted or measured times of all actions of one step.

    Attributes:
        num_devices: Number of devices.
        spans: The start and end of every action, sorted by start.
        step_seconds: Duration of the step, including the optimizer's update if it is known.
        peak_bytes: Peak memory of each device; empty if unknown.
    """

    num_devices: int
    spans: tuple[Span, ...]
    step_seconds: float
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they run no action, from 0 to 1."""
        busy_seconds = sum(span.end_seconds - span.begin_seconds for span in self.spans)
        return 1 - busy_seconds / (self.num_devices * self.step_seconds) if self.step_seconds else 0.0


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Simulate a step of a schedule.

    An action starts as soon as its device is free and its inputs have arrived. Transfers start when their tensor is
    ready, and overlap with actions and with each other. Stages on the same device need no transfer.

    Args:
        schedule: A valid schedule (`schedule.check`).
        durations: The durations of its actions and transfers.

    Raises:
        ValueError: If `durations` lacks entries that the schedule needs, or the schedule deadlocks.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> equal = Durations((1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0), transfer_seconds=(0.0,))
        >>> timeline = simulate(schedule.make("1f1b", num_stages=2, num_microbatches=4), equal)
        >>> timeline.step_seconds, round(timeline.bubble, 9)
        (15.0, 0.2)
    """
    _check(schedule, durations)
    spans = _spans(schedule, durations)
    free_seconds = [0.0, *(span.end_seconds for span in spans)]
    updates = durations.update_seconds
    update_seconds = max(sum(updates[device :: schedule.num_devices]) for device in range(schedule.num_devices))
    return Timeline(
        len(schedule.actions),
        tuple(sorted(spans, key=lambda span: (span.begin_seconds, span.device))),
        max(*free_seconds, *_gradient_ends(schedule, durations, last_ends(schedule, spans))) + update_seconds,
        tuple(
            peak_bytes(schedule, durations, range(device, schedule.num_stages, schedule.num_devices), replica)
            for replica in range(schedule.num_replicas)
            for device in range(schedule.num_devices)
        ),
    )


def _spans(schedule: Schedule, durations: Durations) -> list[Span]:
    seconds, scale = _action_seconds(schedule, durations), _scale(schedule, durations)

    def device_of(action: Action) -> int:
        return schedule.device_of(action.stage, action.microbatch)

    def transfer_seconds(sent: Action, action: Action) -> float:
        if device_of(sent) == device_of(action):
            return 0.0
        return durations.transfer_seconds[min(sent.stage, action.stage)] * scale[action.microbatch]

    spans: dict[Action, Span] = {}
    free_seconds = collections.defaultdict[int, float](float)
    for action in schedule.in_order():
        device = device_of(action)
        arrivals = [spans[sent].end_seconds + transfer_seconds(sent, action) for sent in schedule.dependencies(action)]
        begin_seconds = max(free_seconds[device], *arrivals, 0.0)
        free_seconds[device] = begin_seconds + seconds[action.kind][action.stage] * scale[action.microbatch]
        spans[action] = Span(action, device, begin_seconds, free_seconds[device])
    return list(spans.values())


def last_ends(schedule: Schedule, spans: Iterable[Span]) -> list[float]:
    """Return when the last action of each stage ends, over all replicas.

    Args:
        schedule: The schedule.
        spans: The start and end of its actions.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> gpipe = schedule.make("gpipe", num_stages=2, num_microbatches=1)
        >>> last_ends(gpipe, simulate(gpipe, Durations((1.0, 1.0), (2.0, 2.0), (), (), (0.0,))).spans)
        [6.0, 4.0]
    """
    last = [0.0] * schedule.num_stages
    for (_, stage, _), _, _, end_seconds in spans:
        last[stage] = max(last[stage], end_seconds)
    return last


def end_times(ready_seconds: Sequence[float], seconds: Sequence[float], resources: Sequence[Hashable]) -> list[float]:
    """Return when each task ends, if each resource runs its tasks one at a time in the order of their readiness.

    Args:
        ready_seconds: The earliest start of each task.
        seconds: The duration of each task.
        resources: The device or link that each task occupies.

    Example:
        >>> end_times([1.0, 0.0, 0.0], [2.0, 3.0, 1.0], ["link", "link", "other"])
        [5.0, 3.0, 1.0]
    """
    free = collections.defaultdict[Hashable, float](float)
    ends = [0.0] * len(ready_seconds)
    for task in sorted(range(len(ready_seconds)), key=ready_seconds.__getitem__):
        ends[task] = max(free[resources[task]], ready_seconds[task]) + seconds[task]
        free[resources[task]] = ends[task]
    return ends


def _gradient_ends(schedule: Schedule, durations: Durations, last: Sequence[float]) -> list[float]:
    """Return when the gradients of each stage are summed over replicas and workers."""
    zeros = (0.0,) * schedule.num_stages
    devices = [schedule.device_of(stage) for stage in range(schedule.num_stages)]
    summed = end_times(last, durations.reduction_seconds or zeros, devices)
    return end_times(summed, durations.all_reduce_seconds or zeros, ["link"] * len(summed))


def _action_seconds(schedule: Schedule, durations: Durations) -> dict[Kind, Sequence[float]]:
    backward = durations.input_gradient_seconds if schedule.splits_backward else durations.backward_seconds
    return {"F": durations.forward_seconds, "B": backward, "W": durations.weight_gradient_seconds}


def _scale(schedule: Schedule, durations: Durations) -> Sequence[float]:
    return durations.microbatch_scale or (1.0,) * schedule.num_microbatches


def peak_bytes(schedule: Schedule, durations: Durations, stages: Collection[int], replica: int = 0) -> int:
    """Return the peak memory of stages on one device. It depends on the order of the actions, not on their times.

    Args:
        schedule: The order of the actions.
        durations: The bytes of the actions.
        stages: Indices of stages on the same device.
        replica: Index of the replica.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> sizes = Durations((), (), (), (), (), activation_bytes=(100, 10), fixed_bytes=(7, 3))
        >>> peak_bytes(schedule.make("1f1b", num_stages=2, num_microbatches=8), sizes, stages=[0])
        207
    """
    zeros, scale, splits = (0,) * schedule.num_stages, _scale(schedule, durations), schedule.splits_backward
    activation_bytes = durations.activation_bytes or zeros
    until_weight_gradient_bytes = (splits and durations.until_weight_gradient_bytes) or zeros
    temporary_bytes = {
        "F": zeros,
        "B": durations.backward_temporary_bytes or zeros,
        "W": durations.weight_gradient_temporary_bytes or zeros,
    }
    peak = saved = float(sum((durations.fixed_bytes or zeros)[stage] for stage in stages))
    device = schedule.device_of(next(iter(stages)), replica * schedule.microbatches_per_replica)
    for kind, stage, microbatch in schedule.actions[device]:
        if stage not in stages:
            continue
        size = scale[microbatch]
        saved += size * activation_bytes[stage] * (kind == "F")
        peak = max(peak, saved + size * temporary_bytes[kind][stage])
        saved += size * until_weight_gradient_bytes[stage] * (kind == "B")
        peak = max(peak, saved)
        if kind == ("W" if splits else "B"):
            saved -= size * (activation_bytes[stage] + until_weight_gradient_bytes[stage])
    return math.ceil(peak)


def _check(schedule: Schedule, durations: Durations) -> None:
    backward = ("input_gradient_seconds", "weight_gradient_seconds")
    required = ("forward_seconds", *(backward if schedule.splits_backward else ("backward_seconds",)))
    _check_entries(durations, required, schedule.num_stages, "stages")
    _check_entries(durations, ("transfer_seconds",), schedule.num_stages - 1, "cuts")
    sizes = [field.name for field in dataclasses.fields(durations) if field.name.endswith("_bytes")]
    optional = ("update_seconds", "reduction_seconds", "all_reduce_seconds", *sizes)
    _check_entries(durations, [name for name in optional if getattr(durations, name)], schedule.num_stages, "stages")
    if durations.microbatch_scale:
        _check_entries(durations, ("microbatch_scale",), schedule.num_microbatches, "micro-batches")


def _check_entries(durations: Durations, names: Sequence[str], number: int, noun: str) -> None:
    for name in names:
        entries = getattr(durations, name)
        if len(entries) != number:
            raise ValueError(
                f"Durations.{name} must have one entry for each of {number} {noun}, received {len(entries)}: {entries}."
            )
        if not all(0 <= entry < math.inf for entry in entries):
            raise ValueError(f"Durations.{name} must be finite and not negative, received {entries}; measure again.")
