"""Schedules as data: the ordered actions of each device, their dependencies and their text format."""

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
        kind: "F" for the forward pass, "B" for the backward pass, "W" for the weight gradients. In schedules with "W",
            "B" computes only the gradients of the stage's inputs.
        stage: Index of the stage. Stage 0 receives the model's inputs.
        microbatch: Index of the micro-batch in the batch.

    Example:
        >>> str(Action("F", stage=0, microbatch=3))
        'F0.3'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    def shifted(self, num_microbatches: int) -> Action:
        """Return the same action of a later micro-batch."""
        return self._replace(microbatch=self.microbatch + num_microbatches)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of the actions on each device in one step.

    `schedule.make` returns the built-in schedules. `schedule.parse` reads a custom one, and `schedule.check` validates
    it.

    All replicas of a pipeline run the same order, each on its own devices and micro-batches. Devices and micro-batches
    are numbered replica by replica.

    Attributes:
        name: One of `schedule.NAMES`, or any other name.
        num_stages: Number of stages of the model.
        num_devices: Number of devices of each replica, which runs stage s on its device `s % num_devices`.
        num_microbatches: Number of micro-batches in a step, over all replicas.
        actions: The actions of each device in order, replica by replica.
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
        """Return the index of the replica that runs a micro-batch."""
        return microbatch // self.microbatches_per_replica

    def replicated(self, num_replicas: int) -> Schedule:
        """Return the schedule of several replicas, each with as many micro-batches as this schedule.

        Example:
            >>> from tfpar.pipeline import schedule
            >>> print(schedule.make("gpipe", num_stages=1, num_microbatches=2).replicated(2).to_text())
            gpipe, 2 replicas
            0: F0.0 F0.1 B0.0 B0.1
            1: F0.2 F0.3 B0.2 B0.3
        """
        actions = tuple(
            tuple(action.shifted(replica * self.num_microbatches) for action in order)
            for replica in range(num_replicas)
            for order in self.actions
        )
        return dataclasses.replace(
            self, num_microbatches=num_replicas * self.num_microbatches, actions=actions, num_replicas=num_replicas
        )

    def forward_first(self) -> Schedule:
        """Return the schedule with all forward passes of each device before its first backward pass.

        As in GPipe, the loss can then be computed from the outputs of all micro-batches.

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
    def first_replica(self) -> Schedule:
        """The schedule of the first replica. The others run the same actions on their own micro-batches."""
        actions = self.actions[: self.num_devices]
        return dataclasses.replace(
            self, num_microbatches=self.microbatches_per_replica, actions=actions, num_replicas=1
        )

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients in separate "W" actions."""
        return any(action.kind == "W" for order in self.actions for action in order)

    def device_of(self, stage: int, microbatch: int = 0) -> int:
        """Return the index of the device that runs a stage for a micro-batch."""
        return self.replica_of(microbatch) * self.num_devices + stage % self.num_devices

    def dependencies(self, action: Action) -> list[Action]:
        """Return the actions whose results an action reads: first on its own stage, then on the neighbouring stage.

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
        """Return the actions of all devices in one topological order, as if every action took the same time.

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
            ready = [queue for queue in queues if queue and done.keys() >= set(self.dependencies(queue[0]))]
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
        """Return the text that `schedule.parse` reads: the name, then one line of actions for each device."""
        lines = (f"{device}: {' '.join(map(str, order))}" for device, order in enumerate(self.actions))
        replicas = f", {self.num_replicas} replicas" * (self.num_replicas > 1)
        return "\n".join([f"{self.name}{replicas}", *lines])


def parse(text: str) -> Schedule:
    r"""Parse a schedule from text. Use `schedule.check` to validate the result.

    Args:
        text: Text in the format of `Schedule.to_text`. The largest indices determine the number of stages and
            micro-batches.

    Raises:
        ValueError: If the text does not have this format.

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
