"""The plan: the measured layouts of a run in their order, and why others were not measured. Pure Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfpar.layout import Layout
from tfpar.planning import table
from tfpar.planning.model_facts import ModelFacts

if TYPE_CHECKING:
    from tfpar.strategies import Strategy


class Measured(NamedTuple):
    """The measured steps of a layout.

    Args:
        laps: Seconds of a step, as the mean of each lap of steps.
        memory_bytes: Peak memory of the fullest device, of all logical CPUs together; None where it is not counted.
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
        """Half of the distance of the quartiles of the laps.

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
    """The devices of a plan, which are there.

    Args:
        kind: "GPU" or "CPU".
        number: Devices of each worker.
        num_workers: Number of workers.
        memory_bytes: Memory of a device that training can use; None where it has no limit of its own.
    """

    kind: str
    number: int
    num_workers: int = 1
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured layout with its rank.

    Args:
        rank: 1 for the fastest; rows whose difference is within their spreads have the same.
        layout: The layout.
        measured: Its measured steps.
        settings: Section `[strategy]` of the train command.
    """

    rank: int
    layout: Layout
    measured: Measured
    settings: Mapping[str, Any]

    @property
    def step_seconds(self) -> float:
        """The measured step."""
        return self.measured.step_seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ranked layouts of a run. `print` shows a table of 80 columns, a notebook a table of its own.

    Args:
        rows: The measured layouts, the best first.
        others: The layouts without a measured step, with the reason.
        facts: The model and its batch.
        devices: The devices.
        seconds: Seconds that the plan took.
        budget_seconds: Seconds that it could take.
        not_considered: Layouts that are no candidates, in words.
        command: The command that trains the best layout; "" where there is none to show.

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
        """The first row, the simplest of the fastest; None where no layout could be measured."""
        return self.rows[0] if self.rows else None

    @functools.cached_property
    def strategy(self) -> Strategy | None:
        """The strategy of the first row, for `tfpar.Trainer`; None without one."""
        if self.best is None:
            return None
        from tfpar import config  # the table needs no TensorFlow
        from tfpar.strategies import from_settings

        return from_settings(config.with_layout(config.SingleDevice(), self.best.settings))

    def __str__(self) -> str:
        """Return the table as text of 80 columns."""
        return table.text(self)

    def __repr__(self) -> str:
        """Return the table, which an interactive session shows."""
        return table.text(self)

    def _repr_html_(self) -> str:
        return table.html(self)

    def to_json(self) -> str:
        """Return the plan as JSON: the content of `plan.json`, and what `--json` prints."""
        return table.to_json(self)


def ranked(
    measured: Mapping[Layout, Measured],
    facts: ModelFacts,
    devices: Devices,
    settings_of: Callable[[Layout], Mapping[str, Any]],
    others: Sequence[NotMeasured] = (),
    **details: Any,
) -> Plan:
    """Return a plan with the measured layouts in their order.

    A layout is equal to the fastest of its group if their medians differ by no more than both spreads together: the
    measurement cannot tell them apart. Of equal layouts the simplest comes first.

    Args:
        measured: The measured steps of each layout.
        facts: The model and its batch.
        devices: The devices.
        settings_of: Returns section `[strategy]` of the train command for a layout.
        others: The layouts without a measured step.
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
