"""Whether a schedule can run, and how many micro-batches' activations it keeps."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tfpar.pipeline.schedule.actions import Action, Kind, Schedule


def check(schedule: Schedule, max_activations: Sequence[int] | None = None) -> None:
    """Refuse a schedule that cannot run, before anything does.

    Each device must run every action of its own stages once and no other, no action may stand before one that it
    needs, no device may wait for ever, no stage may keep more activations than allowed.

    Args:
        schedule: Any, for example one that `parse` has read.
        max_activations: For each stage, how many micro-batches may be alive at once, as `peak_activations` counts
            them; None for any number.

    Raises:
        ValueError: With the action and the device.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> check(schedule.make("1f1b", num_stages=2, num_microbatches=8), max_activations=[2, 1])
    """
    num_orders = len(schedule.actions)
    if not 0 < num_orders == schedule.num_devices <= schedule.num_stages or schedule.num_stages % num_orders:
        raise ValueError(
            "A schedule must have one order for each device and equally many stages on each, and this one has "
            f"{num_orders} orders, {schedule.num_devices} devices and {schedule.num_stages} stages. Write an order for "
            "each device, and as many stages or a multiple of it."
        )
    for device in range(schedule.num_devices):
        _check_complete(schedule, device)
        _check_local_order(schedule, device)
    schedule.in_order()
    if max_activations is not None:
        _check_activations(schedule, max_activations)


def _check_complete(schedule: Schedule, device: int) -> None:
    stages = range(device, schedule.num_stages, schedule.num_devices)
    kinds: tuple[Kind, ...] = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
    expected = {
        Action(kind, stage, microbatch): None
        for stage in stages
        for microbatch in range(schedule.num_microbatches)
        for kind in kinds
    }
    times = collections.Counter(schedule.actions[device])
    for action in times:
        if action not in expected:
            raise ValueError(
                f"Device {device} must run {'/'.join(kinds)} of stages {', '.join(map(str, stages))} on "
                f"{schedule.num_microbatches} micro-batches, and it has {action}. Move or remove it."
            )
    for action in expected:
        if times[action] != 1:
            raise ValueError(
                f"Device {device} must run {action} once, and it does {times[action]} times. "
                f"{'Remove the others.' if times[action] else 'Add it.'}"
            )


def _check_local_order(schedule: Schedule, device: int) -> None:
    position = {action: index for index, action in enumerate(schedule.actions[device])}
    for action in schedule.actions[device]:
        for needed in schedule.needs(action):
            if position.get(needed, -1) > position[action]:
                raise ValueError(
                    f"An action must stand behind what it needs, and device {device} has {action} before {needed}. "
                    "Put them the other way round."
                )


def _check_activations(schedule: Schedule, max_activations: Sequence[int]) -> None:
    if len(max_activations) != schedule.num_stages:
        raise ValueError(
            f"max_activations must have one entry for each of {schedule.num_stages} stages, and it has "
            f"{len(max_activations)}: {list(max_activations)}. Give a number for every stage."
        )
    for order in schedule.actions:
        for action, alive in _alive(schedule, order):
            if alive > max_activations[action.stage]:
                raise ValueError(
                    f"Stage {action.stage} may keep activations of at most {max_activations[action.stage]} "
                    f"micro-batches, and {action} on device {schedule.device_of(action.stage)} makes it {alive}. "
                    f"Move it behind {'W' if schedule.splits_backward else 'B'} of an earlier micro-batch."
                )


def peak_activations(schedule: Schedule) -> list[int]:
    """Return for each stage how many micro-batches' activations are alive at once, at most.

    They live from the beginning of the forward to the end of the last action that reads them: of W where the
    schedule has it, else of B.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> peak_activations(schedule.make("1f1b", num_stages=3, num_microbatches=8))
        [3, 2, 1]
    """
    peak = [0] * schedule.num_stages
    for order in schedule.actions:
        for action, alive in _alive(schedule, order):
            peak[action.stage] = max(peak[action.stage], alive)
    return peak


def _alive(schedule: Schedule, order: Sequence[Action]) -> list[tuple[Action, int]]:
    """Return each action of a device with the number of micro-batches alive in its stage while it runs."""
    last = "W" if schedule.splits_backward else "B"
    count: collections.Counter[int] = collections.Counter()
    alive = []
    for action in order:
        count[action.stage] += action.kind == "F"
        alive.append((action, count[action.stage]))
        count[action.stage] -= action.kind == last
    return alive
