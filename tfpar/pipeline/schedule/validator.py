"""Validation of schedules, and their number of micro-batches in flight."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tfpar.pipeline.schedule.actions import Action, Kind, Schedule


def check(schedule: Schedule, max_activations: Sequence[int] | None = None) -> None:
    """Raise an error if a schedule cannot run.

    Each device must run exactly the actions of its stages, each once and after its dependencies. The devices must not
    deadlock, and no stage may exceed its limit of micro-batches in flight.

    Args:
        schedule: Any schedule, for example the result of `schedule.parse`.
        max_activations: Maximum number of micro-batches in flight on each stage, as counted by `peak_activations`.
            Defaults to no limit.

    Raises:
        ValueError: If the schedule breaks one of these rules. The message names the action and the device.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> check(schedule.make("1f1b", num_stages=2, num_microbatches=8), max_activations=[2, 1])
    """
    num_orders, num_devices = len(schedule.actions), schedule.num_devices
    if not 0 < num_devices <= schedule.num_stages or schedule.num_stages % num_devices or not _fits_replicas(schedule):
        replicas = f" in {schedule.num_replicas} replicas" * (schedule.num_replicas > 1)
        raise ValueError(
            "A schedule must have one line of actions for each device and the same number of stages on each, received "
            f"{num_orders} lines, {num_devices} devices{replicas} and {schedule.num_stages} stages; write one line "
            "for each device, and as many stages as devices or a multiple of them."
        )
    for device in range(num_orders):
        _check_complete(schedule, device)
        _check_local_order(schedule, device)
    schedule.in_order()
    if max_activations is not None:
        _check_activations(schedule, max_activations)


def _fits_replicas(schedule: Schedule) -> bool:
    num_lines, num_replicas = len(schedule.actions), schedule.num_replicas
    return num_lines == num_replicas * schedule.num_devices and schedule.num_microbatches % num_replicas == 0


def _check_complete(schedule: Schedule, device: int) -> None:
    replica, place = divmod(device, schedule.num_devices)
    stages = range(place, schedule.num_stages, schedule.num_devices)
    first = replica * schedule.microbatches_per_replica
    microbatches = range(first, first + schedule.microbatches_per_replica)
    kinds: tuple[Kind, ...] = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
    expected = {
        Action(kind, stage, microbatch): None for stage in stages for microbatch in microbatches for kind in kinds
    }
    times = collections.Counter(schedule.actions[device])
    for action in times:
        if action not in expected:
            raise ValueError(
                f"Device {device} must run {'/'.join(kinds)} of stages {', '.join(map(str, stages))} on "
                f"{_describe(microbatches, schedule)}, received {action}; move or remove it."
            )
    for action in expected:
        if times[action] != 1:
            raise ValueError(
                f"Device {device} must run {action} once, received it {times[action]} times; "
                f"{'remove the others' if times[action] else 'add it'}."
            )


def _describe(microbatches: range, schedule: Schedule) -> str:
    if schedule.num_replicas == 1:
        return f"{len(microbatches)} micro-batches"
    return f"micro-batches {microbatches[0]} to {microbatches[-1]}"


def _check_local_order(schedule: Schedule, device: int) -> None:
    position = {action: index for index, action in enumerate(schedule.actions[device])}
    for action in schedule.actions[device]:
        for dependency in schedule.dependencies(action):
            if position.get(dependency, -1) > position[action]:
                raise ValueError(
                    f"An action must come after its dependencies, received {action} before {dependency} on device "
                    f"{device}; swap them."
                )


def _check_activations(schedule: Schedule, max_activations: Sequence[int]) -> None:
    if len(max_activations) != schedule.num_stages:
        raise ValueError(
            f"max_activations must have one entry for each of {schedule.num_stages} stages, received "
            f"{len(max_activations)}: {list(max_activations)}."
        )
    for order in schedule.actions:
        for action, in_flight in _in_flight(schedule, order):
            if in_flight > max_activations[action.stage]:
                raise ValueError(
                    f"Stage {action.stage} must have at most {max_activations[action.stage]} micro-batches in flight, "
                    f"received {in_flight} at {action} on device {schedule.device_of(*action[1:])}; move it after "
                    f"{'W' if schedule.splits_backward else 'B'} of an earlier micro-batch."
                )


def peak_activations(schedule: Schedule) -> list[int]:
    """Return the largest number of micro-batches in flight on each stage.

    A micro-batch is in flight from the start of F to the end of B, or of W in schedules with weight gradients. During
    this time the stage holds its saved tensors.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> peak_activations(schedule.make("1f1b", num_stages=3, num_microbatches=8))
        [3, 2, 1]
    """
    peak = [0] * schedule.num_stages
    for order in schedule.actions:
        for action, in_flight in _in_flight(schedule, order):
            peak[action.stage] = max(peak[action.stage], in_flight)
    return peak


def _in_flight(schedule: Schedule, order: Sequence[Action]) -> list[tuple[Action, int]]:
    """Return each action of a device with the number of micro-batches in flight on its stage during the action."""
    last = "W" if schedule.splits_backward else "B"
    count: collections.Counter[int] = collections.Counter()
    counted = []
    for action in order:
        count[action.stage] += action.kind == "F"
        counted.append((action, count[action.stage]))
        count[action.stage] -= action.kind == last
    return counted
