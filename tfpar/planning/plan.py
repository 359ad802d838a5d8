"""The plan: the measured layouts of a run, ranked, and why others were not measured. Pure Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfpar.layout import Layout
from tfpar.planning import plan_text
from tfpar.planning.model_facts import ModelFacts

if TYPE_CHECKING:
    from tfpar.strategies import Strategy


class Measured(NamedTuple):
    """The measured steps of a layout.

    Args:
        laps: Seconds per step, the mean of each lap of several steps.
        memory_bytes: Peak memory of the fullest GPU, or of all logical CPUs together; None if unknown.
    """

    laps: tuple[float, ...]
    memory_bytes: int | None = None

    @property
    def step_seconds(self) -> float:
        """The median of the laps.

        Example:
            >>> Measured((1.0, 1.2, 5.0)).step_seconds
            1.2
        """
        return statistics.median(self.laps)

    @property
    def spread_seconds(self) -> float:
        """Half the interquartile range of the laps.

        Example:
            >>> Measured((1.0, 2.0, 3.0, 4.0, 5.0)).spread_seconds
            1.0
        """
        if len(self.laps) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.laps, n=4, method="inclusive")
        return (high - low) / 2


class NotMeasured(NamedTuple):
    """A layout without a measured step.

    Args:
        layout: The layout.
        reason: Why, in a few words.
    """

    layout: Layout
    reason: str


class Devices(NamedTuple):
    """The available devices.

    Args:
        kind: "GPU" or "CPU".
        number: Devices of each worker.
        num_workers: Number of workers.
        memory_bytes: Memory of one device that training can use; None for devices without a limit of their own.
    """

    kind: str
    number: int
    num_workers: int = 1
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured layout with its rank.

    Args:
        rank: 1 for the fastest; rows that differ by less than their spreads have the same rank.
        layout: The layout.
        measured: Its measured steps.
        settings: The section `[strategy]` that trains it with the train command.
    """

    rank: int
    layout: Layout
    measured: Measured
    settings: Mapping[str, Any]

    @property
    def step_seconds(self) -> float:
        """The median seconds of a step."""
        return self.measured.step_seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ranked layouts of a run. `print` and notebooks show it as a table.

    Args:
        rows: The measured layouts, the best first.
        others: The layouts that were not measured, with the reasons.
        facts: The model and its batch.
        devices: The available devices.
        seconds: Seconds that planning took.
        budget_seconds: Seconds that planning was allowed to take.
        not_considered: Layouts that are not candidates, with the reasons.
        command: The command that trains the best layout; "" if the plan is not of a configuration.

    Example:
        >>> facts = ModelFacts("mlp", 100, 32, 400, (400,), 800)
        >>> plan = ranked({Layout(): Measured((0.025,))}, facts, Devices("CPU", 1), Layout.settings.fget)
        >>> plan.best.layout, plan.best.step_seconds
        (Layout(...), 0.025)
        >>> "SingleDevice" in str(plan), "<table" in plan._repr_html_()
        (True, True)
    """

    rows: tuple[Row, ...]
    others: tuple[NotMeasured, ...]
    facts: ModelFacts
    devices: Devices
    seconds: float = 0.0
    budget_seconds: float = 0.0
    not_considered: tuple[str, ...] = ()
    command: str = ""

    @property
    def best(self) -> Row | None:
        """The first row: the simplest of the fastest layouts; None if no layout could be measured."""
        return self.rows[0] if self.rows else None

    @functools.cached_property
    def strategy(self) -> Strategy | None:
        """The strategy of the best row, for `tfpar.Trainer`; None if there is no row."""
        if self.best is None:
            return None
        from tfpar import config  # the table needs no TensorFlow
        from tfpar.strategies import from_settings

        return from_settings(config.with_layout(config.SingleDevice(), self.best.settings))

    def __str__(self) -> str:
        """Return the table as text of 80 columns."""
        return plan_text.text(self)

    def __repr__(self) -> str:
        """Return the table, for interactive sessions."""
        return plan_text.text(self)

    def _repr_html_(self) -> str:
        return plan_text.html(self)

    def to_json(self) -> str:
        """Return the plan as JSON, as in `plan.json` and printed by `--json`."""
        return plan_text.to_json(self)


def ranked(
    measured: Mapping[Layout, Measured],
    facts: ModelFacts,
    devices: Devices,
    settings_of: Callable[[Layout], Mapping[str, Any]],
    others: Sequence[NotMeasured] = (),
    **details: Any,
) -> Plan:
    """Rank the measured layouts.

    Layouts have the same rank if their median differs from that of the fastest in the group by no more than both
    spreads together, which the measurement cannot tell apart. Among these the simplest comes first.

    Args:
        measured: The measured steps of each layout.
        facts: The model and its batch.
        devices: The available devices.
        settings_of: Returns the section `[strategy]` of a layout.
        others: The layouts that were not measured.
        details: Other arguments of `Plan`.

    Example:
        >>> laps = {Layout(): Measured((1.0, 1.3)), Layout(2): Measured((0.9, 1.3)), Layout(4): Measured((0.5, 0.6))}
        >>> plan = ranked(laps, ModelFacts("mlp", 1, 8, 4, (4,), 0), Devices("CPU", 4), Layout.settings.fget)
        >>> [(row.rank, str(row.layout)) for row in plan.rows]
        [(1, 'Mirrored(4)'), (2, 'SingleDevice'), (2, 'Mirrored(2)')]
    """
    rows: list[Row] = []
    rest = sorted(measured, key=lambda layout: (measured[layout].step_seconds, layout.simplicity))
    while rest:
        equal = list(itertools.takewhile(functools.partial(_are_equal, measured, rest[0]), rest))
        rest, rank = rest[len(equal) :], len(rows) + 1
        equal.sort(key=lambda layout: layout.simplicity)
        rows += [Row(rank, layout, measured[layout], settings_of(layout)) for layout in equal]
    return Plan(tuple(rows), tuple(others), facts, devices, **details)


def _are_equal(measured: Mapping[Layout, Measured], fastest: Layout, layout: Layout) -> bool:
    first, other = measured[fastest], measured[layout]
    return other.step_seconds - first.step_seconds <= first.spread_seconds + other.spread_seconds
