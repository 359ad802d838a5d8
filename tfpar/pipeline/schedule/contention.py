"""Actions on devices that slow each other down, such as logical CPUs, which share cores and memory. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tfpar.pipeline.schedule.actions import Action, Schedule


def contended_times(
    schedule: Schedule,
    seconds_of: Callable[[Action], float],
    transfer_seconds_of: Callable[[Action, Action], float],
    slowdown: Sequence[float],
) -> Mapping[Action, tuple[float, float]]:
    """Compute the start and end of each action where the speed of a device depends on how many compute.

    Args:
        schedule: A valid schedule.
        seconds_of: Returns the seconds of an action on a device that computes alone.
        transfer_seconds_of: Returns the seconds from the end of an action until an action that needs it may start.
        slowdown: The seconds with 1, 2 and so on devices at once, relative to one; the last holds for more.

    Returns:
        Start and end of each action, in seconds.

    Raises:
        ValueError: If the schedule deadlocks.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> two = schedule.make("gpipe", num_stages=1, num_microbatches=1).replicated(2)
        >>> contended_times(two, lambda action: 1.0, lambda one, other: 0.0, [1.0, 1.5])[Action("B", 0, 1)]
        (1.5, 3.0)
    """
    left: dict[int, float] = {}  # seconds of the running action of each device, alone
    begun: dict[int, float] = {}
    done: dict[Action, tuple[float, float]] = {}
    positions, now = [0] * len(schedule.actions), 0.0
    while True:
        starts = [math.inf]
        for device, queue in enumerate(schedule.actions):
            if device in left or positions[device] == len(queue):
                continue
            ready_seconds = _ready(schedule, queue[positions[device]], done, transfer_seconds_of)
            if ready_seconds <= now:
                left[device], begun[device] = seconds_of(queue[positions[device]]), now
            else:
                starts.append(ready_seconds)
        slow = slowdown[min(len(left), len(slowdown)) - 1] if left else 1.0
        following = min(*starts, now + slow * min(left.values(), default=math.inf), math.inf)
        if following == math.inf:
            break
        ended = [device for device, rest in left.items() if now + slow * rest <= following]
        left = {device: rest - (following - now) / slow for device, rest in left.items()}
        now = following
        for device in ended:
            done[schedule.actions[device][positions[device]]] = begun[device], now
            positions[device] += 1
            del left[device]
    if any(position < len(queue) for position, queue in zip(positions, schedule.actions, strict=True)):
        schedule.in_order()  # raises, and says which actions wait for each other
    return done


def _ready(
    schedule: Schedule,
    action: Action,
    done: Mapping[Action, tuple[float, float]],
    transfer_seconds_of: Callable[[Action, Action], float],
) -> float:
    """Return when the inputs of an action are there; infinite as long as one of them is not computed."""
    needed = schedule.dependencies(action)
    if any(one not in done for one in needed):
        return math.inf
    return max((done[one][1] + transfer_seconds_of(one, action) for one in needed), default=0.0)
