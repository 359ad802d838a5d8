"""Actions on devices that slow each other down, such as logical CPUs, which share cores and memory. Pure Python."""

from __future__ import annotations

import collections
import heapq
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
    run = _Run(schedule, seconds_of, transfer_seconds_of, slowdown)
    run.to_end()
    if len(run.done) < sum(map(len, schedule.actions)):
        schedule.in_order()  # raises, and says which actions wait for each other
    return run.done


class _Run:
    """The devices of a schedule over time.

    All running actions are equally slow, so they are ordered by `work`: the seconds that a device would have computed
    since the start without others.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds_of: Callable[[Action], float],
        transfer_seconds_of: Callable[[Action, Action], float],
        slowdown: Sequence[float],
    ) -> None:
        self._schedule, self._seconds_of = schedule, seconds_of
        self._transfer_seconds_of, self._slowdown = transfer_seconds_of, slowdown
        self.done: dict[Action, tuple[float, float]] = {}
        self._now = self._work = 0.0
        self._queues = [collections.deque(queue) for queue in schedule.actions]
        self._running: list[tuple[float, int, float]] = []  # the work at its end, the device, the seconds at its start
        self._arriving: list[tuple[float, int]] = []  # when the inputs of a device's next action are there
        self._waiting: dict[Action, list[int]] = collections.defaultdict(list)  # devices, by an action that they need

    def to_end(self) -> None:
        """Run until no action runs or can start."""
        for device in range(len(self._queues)):
            self._prepare(device)
        while self._running or self._arriving:
            end_seconds = self._end_seconds()
            if self._arriving and self._arriving[0][0] < end_seconds:
                self._advance(self._arriving[0][0])
            else:
                self._end(end_seconds)
            while self._arriving and self._arriving[0][0] <= self._now:
                self._start(heapq.heappop(self._arriving)[1])

    def _prepare(self, device: int) -> None:
        """Note when the next action of a device can start, or which action it waits for."""
        if not self._queues[device]:
            return
        action = self._queues[device][0]
        needed = self._schedule.dependencies(action)
        missing = next((one for one in needed if one not in self.done), None)
        if missing is not None:
            self._waiting[missing].append(device)
            return
        arrivals = (self.done[one][1] + self._transfer_seconds_of(one, action) for one in needed)
        heapq.heappush(self._arriving, (max([self._now, *arrivals]), device))

    def _start(self, device: int) -> None:
        end = self._work + self._seconds_of(self._queues[device][0])
        heapq.heappush(self._running, (end, device, self._now))

    @property
    def _slow(self) -> float:
        return self._slowdown[min(len(self._running), len(self._slowdown)) - 1] if self._running else 1.0

    # The sums are exact where nothing is slow: then work and time are the same.
    def _end_seconds(self) -> float:
        if not self._running:
            return math.inf
        end = self._running[0][0]
        return end + (self._now - self._work) + (self._slow - 1) * (end - self._work)

    def _advance(self, seconds: float) -> None:
        self._work = seconds - (self._now - self._work) - (seconds - self._now) * (1 - 1 / self._slow)
        self._now = seconds

    def _end(self, seconds: float) -> None:
        self._now, self._work = seconds, self._running[0][0]
        while self._running and self._running[0][0] <= self._work:
            _, device, begin_seconds = heapq.heappop(self._running)
            action = self._queues[device].popleft()
            self.done[action] = begin_seconds, seconds
            for other in [device, *self._waiting.pop(action, [])]:
                self._prepare(other)


def ends_together(seconds: Sequence[float], slowdown: Sequence[float]) -> tuple[float, ...]:
    """Return the end of each of some tasks that start together on devices of their own.

    Args:
        seconds: The duration of each alone.
        slowdown: As for `contended_times`, with an entry for each number of tasks.

    Example:
        >>> ends_together([1.0, 3.0], [1.0, 1.5])
        (1.5, 3.5)
    """
    ends, now_seconds, done_seconds = [0.0] * len(seconds), 0.0, 0.0
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    for position, task in enumerate(order):
        now_seconds += (seconds[task] - done_seconds) * slowdown[len(order) - position - 1]
        ends[task], done_seconds = now_seconds, seconds[task]
    return tuple(ends)
