"""Construction of the built-in schedules. Pure Python."""

from __future__ import annotations

from typing import get_args

from tfpar.layout import ScheduleName
from tfpar.pipeline.schedule import orders
from tfpar.pipeline.schedule.actions import Action, Schedule

NAMES: tuple[str, ...] = get_args(ScheduleName)


def make(name: str, num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return one of the built-in schedules.

    Args:
        name: "gpipe": all forward passes, then all backward passes. "1f1b": alternates forward and backward passes; as
            fast as "gpipe" when stages take equal times, with memory that does not grow with the number of
            micro-batches. "interleaved": 1F1B with several stages on each device; a smaller bubble, more transfers.
            "zero_bubble": 1F1B with separate weight gradients, which fill the bubble; every stage saves tensors of as
            many micro-batches as the first stage of 1F1B.
        num_stages: Number of stages, at least 1. For "interleaved", a multiple of `num_devices`, at least twice it.
        num_microbatches: Number of micro-batches in a step, at least 1. For "interleaved", a multiple of `num_devices`.
        num_devices: Number of devices. Defaults to `num_stages`, or half of it for "interleaved".

    Raises:
        ValueError: If the name is unknown, or the schedule does not support these numbers.

    Example:
        >>> print(make("zero_bubble", num_stages=2, num_microbatches=3).to_text())
        zero_bubble
        0: F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2
        1: F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2
    """
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, received {name!r}.")
    for argument, number in [("num_stages", num_stages), ("num_microbatches", num_microbatches)]:
        if number < 1:
            raise ValueError(f"{argument} must be at least 1, received {number}.")
    if name == "interleaved":
        num_devices = num_stages // 2 if num_devices is None else num_devices
        _check_interleaved(num_stages, num_microbatches, num_devices)
        actions = orders.interleaved(num_stages, num_microbatches, num_devices)
        return Schedule(name, num_stages, num_devices, num_microbatches, actions)
    if num_devices not in (None, num_stages):
        raise ValueError(
            f"Schedule {name!r} needs one device for each stage, received {num_stages} stages and {num_devices} "
            f"devices; set num_stages to {num_devices}, or choose schedule 'interleaved'."
        )
    order = {"gpipe": orders.gpipe, "1f1b": orders.one_forward_one_backward, "zero_bubble": orders.zero_bubble}[name]
    return Schedule(name, num_stages, num_stages, num_microbatches, order(num_stages, num_microbatches))


def on_one_device(num_stages: int) -> Schedule:
    """Return the schedule of one micro-batch on one device that runs all stages.

    Example:
        >>> print(on_one_device(num_stages=3).to_text())
        on one device
        0: F0.0 F1.0 F2.0 B2.0 B1.0 B0.0
    """
    stages = range(num_stages)
    order = [*(Action("F", stage, 0) for stage in stages), *(Action("B", stage, 0) for stage in reversed(stages))]
    return Schedule("on one device", num_stages, 1, 1, (tuple(order),))


def limit_stages(schedule: Schedule, max_stages: int) -> Schedule:
    """Return a schedule of the same kind with at most `max_stages` stages, for models with few layer calls.

    "interleaved" becomes "1f1b" if only one stage per device is left.

    Args:
        schedule: One of the built-in schedules.
        max_stages: Maximum number of stages.

    Example:
        >>> limit_stages(make("gpipe", num_stages=4, num_microbatches=2), max_stages=3).num_stages
        3
    """
    if max_stages >= schedule.num_stages:
        return schedule
    return _with_stages(schedule.first_replica, max_stages).replicated(schedule.num_replicas)


def _with_stages(schedule: Schedule, max_stages: int) -> Schedule:
    name, devices, microbatches = schedule.name, schedule.num_devices, schedule.num_microbatches
    if name != "interleaved":
        return make(name, max(max_stages, 1), microbatches)
    if max_stages >= 2 * devices:
        return make(name, max_stages - max_stages % devices, microbatches, devices)
    return make("1f1b", max(min(max_stages, devices), 1), microbatches)


def _check_interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> None:
    devices = max(num_devices, 1)
    if num_devices < 1 or num_stages % num_devices or num_stages < 2 * num_devices:
        raise ValueError(
            "Schedule 'interleaved' needs the same number of stages on every device, at least 2, received "
            f"{num_stages} stages and {num_devices} devices; set num_stages to {2 * devices} or a larger multiple of "
            f"{devices}, or choose schedule '1f1b'."
        )
    if num_microbatches % num_devices:
        next_multiple = num_microbatches + num_devices - num_microbatches % num_devices
        raise ValueError(
            "Schedule 'interleaved' needs a multiple of the number of devices as number of micro-batches, received "
            f"{num_microbatches} micro-batches and {num_devices} devices; set num_microbatches to {next_multiple} or "
            f"another multiple of {num_devices}, or choose schedule '1f1b'."
        )
