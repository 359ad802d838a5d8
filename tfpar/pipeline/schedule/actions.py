"""Schedules as data: the actions of each device in order, their dependencies, and a text form."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "W"]
_ACTION = re.compile(r"([FBW])(\d+)\.(\d+)")
_REPLICAS = re.compile(r"(.+), ([1-9]\d*) replicas")


class Action(NamedTuple):
    """A forward or backward pass of one micro-batch on one stage.

    Attributes:
        kind: "F", the forward pass. "B", the backward pass. "W", the gradient of the stage's weights; in schedules
            with "W", "B" is the gradient of the stage's inputs alone.
        stage: Index of the stage, from 0 at the model's inputs.
        microbatch: Index of the micro-batch, from 0 in the order of the examples in the batch.

    Example:
        >>> str(Action("F", stage=0, microbatch=3))
        'F0.3'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of the actions on each device in one step.

    `schedule.make` returns the built-in schedules. `schedule.parse` reads one of your own, and `schedule.check`
    validates it.

    Several replicas of a pipeline run the same order, each on devices and micro-batches of its own: the first replica
    on the first devices and micro-batches, and so on.

    Attributes:
        name: One of `schedule.NAMES`, or a name of your own.
        num_stages: Number of stages of the model.
        num_devices: Number of devices of a replica. Stage s runs on device `s % num_devices` of each.
        num_microbatches: Number of micro-batches in a step, those of all replicas.
        actions: The actions of each device of each replica, in the order of their execution.
        num_replicas: Number of replicas.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> print(schedule.make("1f1b", num_stages=2, num_microbatches=3).to_text())
        1f1b
        0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
        1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """

    name: str
    num_stages: int
    num_devices: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    num_replicas: int = 1

    @property
    def microbatches_per_replica(self) -> int:
        """The number of micro-batches of each replica."""
        return self.num_microbatches // self.num_replicas

    def replica_of(self, microbatch: int) -> int:
        """Return the index of the replica that takes a micro-batch."""
        return microbatch // self.microbatches_per_replica

    def replicated(self, num_replicas: int) -> Schedule:
        """Return the schedule of several replicas of this pipeline, with as many micro-batches for each.

        Args:
            num_replicas: Number of replicas.

        Example:
            >>> from tfpar.pipeline import schedule
            >>> print(schedule.make("gpipe", num_stages=1, num_microbatches=2).replicated(2).to_text())
            gpipe, 2 replicas
            0: F0.0 F0.1 B0.0 B0.1
            1: F0.2 F0.3 B0.2 B0.3
        """
        actions = tuple(
            tuple(one._replace(microbatch=one.microbatch + replica * self.num_microbatches) for one in order)
            for replica in range(num_replicas)
            for order in self.actions
        )
        return dataclasses.replace(
            self, num_microbatches=num_replicas * self.num_microbatches, actions=actions, num_replicas=num_replicas
        )

    def forward_first(self) -> Schedule:
        """Return the schedule in which each device runs all its forward passes before its first backward pass.

        It is the order of GPipe, in which a loss can take the outputs of all micro-batches.

        Example:
            >>> from tfpar.pipeline import schedule
            >>> print(schedule.make("1f1b", num_stages=2, num_microbatches=2).forward_first().to_text())
            1f1b, forward passes first
            0: F0.0 F0.1 B0.0 B0.1
            1: F1.0 F1.1 B1.0 B1.1
        """
        actions = tuple(tuple(sorted(order, key=lambda action: action.kind != "F")) for order in self.actions)
        if actions == self.actions:
            return self
        return dataclasses.replace(self, name=f"{self.name}, forward passes first", actions=actions)

    @property
    def of_one_replica(self) -> Schedule:
        """The schedule of the first replica, which that of every other equals but for the micro-batches."""
        actions = self.actions[: self.num_devices]
        return dataclasses.replace(
            self, num_microbatches=self.microbatches_per_replica, actions=actions, num_replicas=1
        )

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate actions."""
        return any(action.kind == "W" for order in self.actions for action in order)

    def device_of(self, stage: int, microbatch: int = 0) -> int:
        """Return the index of the device that runs a stage for a micro-batch."""
        return self.replica_of(microbatch) * self.num_devices + stage % self.num_devices

    def dependencies(self, action: Action) -> list[Action]:
        """Return the actions whose results an action reads: first of the same stage, then of a neighbouring stage.

        Args:
            action: One of the actions of the schedule.

        Example:
            >>> from tfpar.pipeline import schedule
            >>> gpipe = schedule.make("gpipe", num_stages=2, num_microbatches=1)
            >>> [str(dependency) for dependency in gpipe.dependencies(Action("B", stage=0, microbatch=0))]
            ['F0.0', 'B1.0']
        """
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", stage - 1, microbatch)] if stage > 0 else []
        if kind == "W":
            return [Action("B", stage, microbatch)]
        later = [Action("B", stage + 1, microbatch)] if stage < self.num_stages - 1 else []
        return [Action("F", stage, microbatch), *later]

    def in_order(self) -> list[Action]:
        """Return the actions of all devices in one topological order.

        It is the order in time if every action takes one unit of time, so that devices alternate as in a real step.

        Raises:
            ValueError: If the schedule deadlocks.

        Example:
            >>> from tfpar.pipeline import schedule
            >>> print(*schedule.make("1f1b", num_stages=2, num_microbatches=2).in_order())
            F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 B1.1 B0.1
        """
        done: dict[Action, None] = {}  # an ordered set
        queues = [collections.deque(order) for order in self.actions]
        while any(queues):
            ready = [queue for queue in queues if queue and all(one in done for one in self.dependencies(queue[0]))]
            if not ready:
                raise ValueError(self._deadlock(queues, done))
            done.update(dict.fromkeys([queue.popleft() for queue in ready]))
        return list(done)

    def _deadlock(self, queues: Sequence[Sequence[Action]], done: Container[Action]) -> str:
        waits = [
            f"device {device} waits before {queue[0]} for "
            + " and ".join(str(dependency) for dependency in self.dependencies(queue[0]) if dependency not in done)
            for device, queue in enumerate(queues)
            if queue
        ]
        return (
            f"A schedule must not deadlock, received {self.name!r}, where {', '.join(waits)}; move the actions that "
            "other devices wait for to an earlier place."
        )

    def to_text(self) -> str:
        """Return the name and one line of actions for each device, the text that `schedule.parse` reads."""
        lines = (f"{device}: {' '.join(map(str, order))}" for device, order in enumerate(self.actions))
        replicas = f", {self.num_replicas} replicas" * (self.num_replicas > 1)
        return "\n".join([f"{self.name}{replicas}", *lines])


def parse(text: str) -> Schedule:
    r"""Parse the text form of a schedule. `schedule.check` validates the result.

    Args:
        text: A name, for several replicas with their number, then one line for each device, in the format of
            `Schedule.to_text`. The largest indices set the numbers of stages and micro-batches.

    Returns:
        The schedule, not validated.

    Raises:
        ValueError: If the text has another format.

    Example:
        >>> parse("mine\n0: F0.0 F0.1 B0.1 B0.0").num_microbatches
        2
    """
    name, *lines = text.strip().splitlines() or [""]
    actions = tuple(_parse_device(device, line) for device, line in enumerate(lines))
    all_actions = [action for order in actions for action in order]
    if not all_actions:
        raise ValueError(
            "The text of a schedule must be its name, then one line for each device like '0: F0.0 B0.0', received "
            f"{text!r}; see the output of Schedule.to_text."
        )
    num_stages = 1 + max(action.stage for action in all_actions)
    num_microbatches = 1 + max(action.microbatch for action in all_actions)
    named = _REPLICAS.fullmatch(name.strip())
    if named is None:
        return Schedule(name.strip(), num_stages, len(actions), num_microbatches, actions)
    num_replicas = int(named[2])
    return Schedule(named[1], num_stages, len(actions) // num_replicas, num_microbatches, actions, num_replicas)


def _parse_device(device: int, line: str) -> tuple[Action, ...]:
    first, *words = line.split() or [""]
    if first != f"{device}:":
        raise ValueError(
            f"The line of device {device} must begin with '{device}:', received {line.strip()!r}; write one line for "
            "each device, in order."
        )
    return tuple(_parse_action(device, word) for word in words)


def _parse_action(device: int, word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(
            f"An action must be written as F, B or W, stage, dot, micro-batch, like F0.3, received {word!r} on device "
            f"{device}; correct it."
        )
    return Action(cast(Kind, match[1]), int(match[2]), int(match[3]))
