"""The steady state of a schedule: actions that repeat with later micro-batches, and become one loop in a graph."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule.actions import Action

_MAX_SHIFT = 16  # an interleaved schedule repeats after as many micro-batches as it has devices


class Segment(NamedTuple):
    """Consecutive actions of a schedule, repeated with later micro-batches.

    Args:
        actions: The actions of the first repetition.
        repeats: Number of repetitions.
        shift: The number of micro-batches by which each repetition is later than the one before.
    """

    actions: tuple[Action, ...]
    repeats: int = 1
    shift: int = 0

    def unrolled(self) -> list[Action]:
        """Return the actions of all repetitions.

        Example:
            >>> print(*Segment((Action("F", 0, 1),), repeats=2, shift=1).unrolled())
            F0.1 F0.2
        """
        return [_later(action, turn * self.shift) for turn in range(self.repeats) for action in self.actions]


def segments(actions: Sequence[Action]) -> list[Segment]:
    """Split actions into those before the steady state, the steady state, and those after it.

        F0.0 F0.1 F1.0 B1.0 B0.0 │ F1.1 F0.2 B1.1 B0.1 │ F1.2 F0.3 B1.2 B0.2 │ F1.3 B1.3 B0.3
        before                     steady state, repeated once                 after

    In the steady state every pass of every stage (F, B and W where there is one) runs once for each of `shift` more
    micro-batches, and has run before, so that as many tensors are saved after a repetition as before it. A schedule
    without one, such as GPipe, is a single segment.

    Args:
        actions: All actions of a step, in a topological order.

    Returns:
        The segments in order. `unrolled` of all of them gives the actions.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> order = schedule.make("1f1b", num_stages=2, num_microbatches=8).in_order()
        >>> [(len(one.actions), one.repeats) for one in segments(order)]
        [(5, 1), (4, 6), (3, 1)]
    """
    lanes = {(action.kind, action.stage) for action in actions}
    if _in_turn(actions):
        for shift in range(1, _MAX_SHIFT + 1):
            first, repeats = _longest(actions, shift, len(lanes))
            if repeats > 1:
                length = shift * len(lanes)
                rest = first + length * repeats
                steady = Segment(tuple(actions[first : first + length]), repeats, shift)
                return [Segment(tuple(actions[:first])), steady, *_not_empty(actions[rest:])]
    return _not_empty(actions)


def _not_empty(actions: Sequence[Action]) -> list[Segment]:
    return [Segment(tuple(actions))] if actions else []


def _longest(actions: Sequence[Action], shift: int, num_lanes: int) -> tuple[int, int]:
    """Return where the longest steady state with a shift begins, and its number of repetitions."""
    length = shift * num_lanes
    same = [_later(one, shift) == other for one, other in zip(actions, actions[length:], strict=False)]
    best, run = (0, 1), 0
    for first in reversed(range(len(same))):
        run = run + 1 if same[first] else 0
        repeats = run // length + 1
        if repeats > 1 and repeats >= best[1] and _is_steady(actions, first, length, shift, num_lanes):
            best = first, repeats
    return best


def _is_steady(actions: Sequence[Action], first: int, length: int, shift: int, num_lanes: int) -> bool:
    """Return whether every lane has run before, and each runs `shift` times in one repetition."""
    before = {(action.kind, action.stage) for action in actions[:first]}
    window = collections.Counter((action.kind, action.stage) for action in actions[first : first + length])
    return len(before) == num_lanes == len(window) and set(window.values()) == {shift}


def _in_turn(actions: Sequence[Action]) -> bool:
    """Return whether every lane takes the micro-batches in their order."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    for action in actions:
        if counts[action.kind, action.stage] != action.microbatch:
            return False
        counts[action.kind, action.stage] += 1
    return True


def _later(action: Action, shift: int) -> Action:
    return action._replace(microbatch=action.microbatch + shift)
