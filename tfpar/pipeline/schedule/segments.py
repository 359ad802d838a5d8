"""Loops in a schedule: actions that repeat with later micro-batches, and become a loop in the graph."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence, Set
from typing import NamedTuple

from tfpar.pipeline.schedule.actions import Action, Kind

_MAX_SHIFT = 16  # an interleaved schedule repeats after as many micro-batches as it has devices
Pass = tuple[Kind, int]  # such as the forward pass of stage 0


class Segment(NamedTuple):
    """Consecutive actions of a schedule, repeated with later micro-batches.

    Args:
        actions: The actions of the first repetition.
        repeats: Number of repetitions.
        shift: Number of micro-batches between one repetition and the next.
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
        return [action.shifted(index * self.shift) for index in range(self.repeats) for action in self.actions]


def segments(actions: Sequence[Action]) -> list[Segment]:
    """Split the actions of a step into loops and the actions between them.

        1F1B   F0.0 F0.1 F1.0 B1.0 B0.0 │ F1.1 F0.2 B1.1 B0.1 │ F1.2 F0.3 B1.2 B0.2 │ F1.3 B1.3 B0.3
               before                     steady state, repeated once                 after

        GPipe  F0.0 F0.1 F1.0 │ F0.2 F1.1 │ F0.3 F1.2 │ F1.3 B1.0 B0.0 │ B1.1 B0.1 │ B1.2 B0.2 │ B1.3 B0.3
               before           forward, repeated once                   backward, repeated twice

    In the steady state, a repetition runs every pass of every stage once for each of `shift` micro-batches, so it
    releases as many saved tensors as it adds. A schedule without a steady state has one loop for each kind of pass, and
    `needs_queues`.

    Args:
        actions: All actions of a step, in topological order.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> order = schedule.make("1f1b", num_stages=2, num_microbatches=8).in_order()
        >>> [(len(segment.actions), segment.repeats) for segment in segments(order)]
        [(5, 1), (4, 6), (3, 1)]
        >>> order = schedule.make("gpipe", num_stages=2, num_microbatches=8).in_order()
        >>> [(len(segment.actions), segment.repeats) for segment in segments(order)]
        [(3, 1), (2, 6), (3, 1), (2, 7)]
    """
    return _split(actions, set()) if _in_turn(actions) else _not_empty(actions)


def needs_queues(segments: Sequence[Segment]) -> bool:
    """Return whether the passes hand over saved tensors in queues.

    In GPipe, one loop of forward passes saves the tensors of all micro-batches, and a later loop of backward passes
    reads them in the same order.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> [needs_queues(segments(schedule.make(name, 2, 8).in_order())) for name in ("gpipe", "1f1b")]
        [True, False]
    """
    passes = _passes([action for segment in segments for action in segment.actions])
    return any(segment.repeats > 1 and _passes(segment.actions) != passes for segment in segments)


def _split(actions: Sequence[Action], before: Set[Pass]) -> list[Segment]:
    """Split consecutive actions of a step; `before` are the passes that have run before them."""
    match = _find_loop(actions, before)
    if match is None:
        return _not_empty(actions)
    first, loop = match
    end = first + len(loop.actions) * loop.repeats
    rest = _split(actions[end:], before | _passes(actions[:end]))
    return [*_split(actions[:first], before), loop, *rest]


def _find_loop(actions: Sequence[Action], before: Set[Pass]) -> tuple[int, Segment] | None:
    """Return the loop with the most kinds of passes, and the index of its first action."""
    passes = before | _passes(actions)
    kinds = sorted({kind for kind, _ in passes})
    for size in range(len(kinds), 0, -1):
        for loop_kinds in itertools.combinations(kinds, size):
            loop_passes = {(kind, stage) for kind, stage in passes if kind in loop_kinds}
            for shift in range(1, _MAX_SHIFT + 1):
                first, repeats = _longest(actions, before, loop_passes, shift)
                if repeats > 1:
                    return first, Segment(tuple(actions[first : first + shift * len(loop_passes)]), repeats, shift)
    return None


def _not_empty(actions: Sequence[Action]) -> list[Segment]:
    return [Segment(tuple(actions))] if actions else []


def _longest(actions: Sequence[Action], before: Set[Pass], passes: Set[Pass], shift: int) -> tuple[int, int]:
    """Return the index of the first action of the longest loop over `passes`, and its number of repetitions."""
    length = shift * len(passes)
    same = [action.shifted(shift) == later for action, later in zip(actions, actions[length:], strict=False)]
    loop_counts = dict.fromkeys(passes, shift)
    best, run = (0, 1), 0
    for first in range(len(same) - 1, _all_have_run(actions, before, passes) - 1, -1):
        run = run + 1 if same[first] else 0
        repeats = run // length + 1
        if repeats > 1 and repeats >= best[1]:
            window = collections.Counter(_pass(action) for action in actions[first : first + length])
            best = (first, repeats) if window == loop_counts else best
    return best


def _all_have_run(actions: Sequence[Action], before: Set[Pass], passes: Set[Pass]) -> int:
    """Return the number of actions after which each of the passes has run at least once."""
    missing = set(passes - before)
    for index, action in enumerate(actions):
        if not missing:
            return index
        missing.discard(_pass(action))
    return len(actions)


def _passes(actions: Sequence[Action]) -> set[Pass]:
    return {_pass(action) for action in actions}


def _pass(action: Action) -> Pass:
    return action.kind, action.stage


def _in_turn(actions: Sequence[Action]) -> bool:
    """Return whether every pass runs the micro-batches in order."""
    counts: collections.Counter[Pass] = collections.Counter()
    for action in actions:
        if counts[_pass(action)] != action.microbatch:
            return False
        counts[_pass(action)] += 1
    return True
