"""The phases of a train step on each replica, as values that JSON has, and back; planned from a plan. No TensorFlow."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from tfpar.reports.number_check import is_number

_NAMES = ("forward", "backward", "all-reduce", "update")
_REDUCTIONS = ("all-reduce", "network")
_OUTSIDE = ("data", "reading data")


@dataclasses.dataclass(frozen=True)
class StepPhases:
    """When the phases of a step begin and end on each replica.

    Args:
        names: The phases in their order, such as "forward".
        moments: For each replica the begin of its step, and the end of each phase; seconds after the first begin.
    """

    names: tuple[str, ...]
    moments: tuple[tuple[float, ...], ...]

    @property
    def step_seconds(self) -> float:
        """The end of the last phase of all replicas."""
        return max(itertools.chain.from_iterable(self.moments), default=0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """The mean seconds of each phase over the replicas, in their order."""
        columns = list(zip(*self.moments, strict=True))
        pairs = zip(self.names, itertools.pairwise(columns), strict=True)
        return {name: (sum(after) - sum(before)) / len(before) for name, (before, after) in pairs}


def to_table(phases: StepPhases) -> dict[str, Any]:
    """Return the phases as values that JSON has.

    Args:
        phases: The phases.
    """
    return {"names": list(phases.names), "moments": [list(row) for row in phases.moments]}


def from_table(table: Any) -> StepPhases | None:
    """Return the phases from values that JSON has; None where they are not those of `to_table`.

    Args:
        table: What `to_table` returned, or anything else.

    Example:
        >>> phases = StepPhases(("forward", "backward"), ((0.0, 0.1, 0.3), (0.1, 0.2, 0.4)))
        >>> from_table(to_table(phases)) == phases
        True
        >>> {name: round(seconds, 3) for name, seconds in phases.seconds.items()}, phases.step_seconds
        ({'forward': 0.1, 'backward': 0.2}, 0.4)
        >>> from_table({"names": 3}) is None
        True
    """
    if not isinstance(table, Mapping):
        return None
    names, rows = table.get("names"), table.get("moments")
    if not isinstance(names, list) or not set(map(str, names)) <= set(_NAMES) or not isinstance(rows, list) or not rows:
        return None
    if not all(isinstance(row, list) and _is_ordered(row) and len(row) == len(names) + 1 for row in rows):
        return None
    return StepPhases(tuple(names), tuple(tuple(map(float, row)) for row in rows))


def _is_duration(value: Any) -> TypeGuard[int | float]:
    return is_number(value) and 0 <= value < math.inf


def _is_ordered(row: Sequence[Any]) -> bool:
    return all(is_number(one) and math.isfinite(one) for one in row) and list(row) == sorted(row)


def planned(row: Mapping[str, Any] | None, like: StepPhases) -> StepPhases | None:
    """Return the phases of a step as planned; None without a plan that says how long the forward pass takes.

    Args:
        row: A row of a plan.
        like: The measured phases, which have the replicas.

    Example:
        >>> row = {"step_seconds": 0.5, "forward_seconds": 0.1, "waits": {"all-reduce": 0.05, "update": 0.05}}
        >>> one = StepPhases(("forward", "backward", "all-reduce", "update"), ((0.0, 0.1, 0.3, 0.4, 0.5),))
        >>> [round(moment, 3) for moment in planned(row, one).moments[0]]
        [0.0, 0.1, 0.4, 0.45, 0.5]
    """
    row = row or {}
    step_seconds, forward, waits = (row.get(name) for name in ("step_seconds", "forward_seconds", "waits"))
    if not _is_duration(step_seconds) or not _is_duration(forward) or not isinstance(waits, Mapping):
        return None
    known = {str(name): float(value) for name, value in waits.items() if _is_duration(value)}
    reduction, outside = (sum(known.get(name, 0.0) for name in group) for group in (_REDUCTIONS, _OUTSIDE))
    update = known.get("update", 0.0)
    inside = step_seconds - outside
    parts = {"forward": forward, "all-reduce": reduction, "update": update}
    parts["backward"] = max(0.0, inside - sum(parts.values()))
    ends = tuple(itertools.accumulate((parts[name] for name in like.names), initial=0.0))
    return StepPhases(like.names, (ends,) * len(like.moments))
