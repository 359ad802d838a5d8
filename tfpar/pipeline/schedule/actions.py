"""A schedule as data: actions, the order in which each device runs them, what each needs, and their text form."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "W"]
_ACTION = re.compile(r"([FBW])(\d+)\.(\d+)")


class Action(NamedTuple):
    """One piece of work on one micro-batch.

    Attributes:
        kind: "F", forward. "B", backward: the whole of it, or the gradient of the stage's input only where the
            schedule also has "W", the gradient of the stage's weights.
        stage: From 0, the stage that reads the input.
        microbatch: From 0, in the order of the examples in the batch.

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
    """Which device runs what, in which order.

    `schedule.make` gives the known ones; `parse` reads one of your own, and `schedule.check` says whether it can run.

    Attributes:
        name: One of `schedule.NAMES`, or a name of your own.
        num_stages: Stages of the model.
        num_devices: Devices; stage s sits on device `s % num_devices`.
        num_microbatches: Micro-batches of a step.
        actions: For each device, its actions in the order in which it runs them.

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

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind == "W" for order in self.actions for action in order)

    def device_of(self, stage: int) -> int:
        """Return the device on which a stage sits."""
        return stage % self.num_devices

    def needs(self, action: Action) -> list[Action]:
        """Return the actions whose results an action takes: of its own stage first, then of a neighbour.

        Example:
            >>> made = parse("mine\\n0: F0.0 B0.0\\n1: F1.0 B1.0")
            >>> [str(needed) for needed in made.needs(Action("B", stage=0, microbatch=0))]
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
        """Return all actions in one order that respects the devices' orders and what each action needs.

        It is the order in time when every action takes one unit, so devices take turns as they do when they run.

        Raises:
            ValueError: If a device would wait for ever.
        """
        done: dict[Action, None] = {}  # as a set that keeps its order
        queues = [collections.deque(order) for order in self.actions]
        while any(queues):
            ready = [queue for queue in queues if queue and all(needed in done for needed in self.needs(queue[0]))]
            if not ready:
                raise ValueError(self._deadlock(queues, done))
            done.update(dict.fromkeys([queue.popleft() for queue in ready]))
        return list(done)

    def _deadlock(self, queues: Sequence[Sequence[Action]], done: Container[Action]) -> str:
        waits = [
            f"device {device} waits before {queue[0]} for "
            + " and ".join(str(needed) for needed in self.needs(queue[0]) if needed not in done)
            for device, queue in enumerate(queues)
            if queue
        ]
        return (
            f"No device of a schedule may wait for ever, and here {', '.join(waits)}. On each device move what another "
            "one waits for to the front."
        )

    def to_text(self) -> str:
        """Return the name, then a line for each device; `parse` reads it back."""
        lines = (f"{device}: {' '.join(map(str, order))}" for device, order in enumerate(self.actions))
        return "\n".join([self.name, *lines])


def parse(text: str) -> Schedule:
    """Return the schedule that a text describes; whether it can run, `schedule.check` says.

    Args:
        text: A name, then a line for each device, as `Schedule.to_text` gives them. Stages and micro-batches count
            from 0 to the largest that is named.

    Raises:
        ValueError: If it is no such text.

    Example:
        >>> parse("mine\\n0: F0.0 F0.1 B0.1 B0.0").num_microbatches
        2
    """
    name, *lines = text.strip().splitlines() or [""]
    actions = tuple(_parse_device(device, line) for device, line in enumerate(lines))
    found = [action for order in actions for action in order]
    if not found:
        raise ValueError(
            "The text of a schedule must be its name, then a line for each device like '0: F0.0 B0.0', and it is "
            f"{text!r}. Schedule.to_text gives such a text."
        )
    num_stages = 1 + max(action.stage for action in found)
    num_microbatches = 1 + max(action.microbatch for action in found)
    return Schedule(name.strip(), num_stages, len(actions), num_microbatches, actions)


def _parse_device(device: int, line: str) -> tuple[Action, ...]:
    first, *words = line.split() or [""]
    if first != f"{device}:":
        raise ValueError(
            f"The line of device {device} must begin with '{device}:', and it is {line.strip()!r}. "
            "Write the devices in order, a line each."
        )
    return tuple(_parse_action(device, word) for word in words)


def _parse_action(device: int, word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(
            f"An action must be written as F, B or W, stage, dot, micro-batch, like F0.3, and device {device} has "
            f"{word!r}. Correct it."
        )
    return Action(cast(Kind, match[1]), int(match[2]), int(match[3]))
