"""The plan: the layouts of a run with their predicted steps, in their order. Pure Python."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfpar.planning import table
from tfpar.planning.costs import MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout

if TYPE_CHECKING:
    from tfpar.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout with its predicted step and its rank.

    Args:
        rank: Its rank: 1 for the fastest; equal rows have the same. None for one that does not fit, and where the
            measurement is too noisy to rank.
        layout: The layout.
        step_seconds: Its predicted step.
        examples_per_second: Examples of the global batch by the measured step, or else the predicted one.
        times_one: Speed relative to one device; None where that is not predicted.
        memory_bytes: Predicted peak memory of the fullest device.
        fits: Whether that is at most the memory of a device; None where that is not known.
        waits: Seconds of the step in which a device does not compute, by reason.
        settings: Section `[strategy]` of the train command.
        largest_batch: The largest global batch that fits; None without a limit.
        lacks: What one that does not fit lacks, in words; "" for one that fits.
        measured_seconds: Its step in a measurement; None where it is predicted only.
        forward_seconds: The predicted seconds of its forward pass; None for a pipeline.
    """

    rank: int | None
    layout: Layout
    step_seconds: float
    examples_per_second: float
    times_one: float | None
    memory_bytes: int
    fits: bool | None
    waits: Mapping[str, float]
    settings: Mapping[str, Any]
    largest_batch: int | None = None
    lacks: str = ""
    measured_seconds: float | None = None
    forward_seconds: float | None = None

    @property
    def known_seconds(self) -> float:
        """The measured step, or else the predicted one."""
        return self.step_seconds if self.measured_seconds is None else self.measured_seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ranked layouts of a run. `print` shows a table of 80 columns, a notebook a table of its own.

    Args:
        rows: Those that fit, the best first; then those that do not fit, the nearest first.
        model: The measured costs of the model.
        machine: The costs of the devices and links.
        taken: The row to take; None where none fits, or the measurement is too noisy to rank.
        command: The command that trains it; "" where there is none to show.
        notes: Sentences on the rows.
        not_considered: Layouts that were refused, with the reason, grouped.
        history: How well earlier runs of this machine were predicted, in words.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> from tfpar.planning.layouts import Layout
        >>> from tfpar.planning.ranking import rank
        >>> from tfpar.planning.rows import PredictedStep
        >>> model = ModelCosts("mlp", 100, 400, 400, 800, (400,), 32, Curve((32,), (0.02,)), 0.001)
        >>> plan = rank([PredictedStep(Layout(), 0.025, {}, 5000)], [], model, MachineCosts("CPU", 1, 1))
        >>> plan.taken.layout, round(plan.taken.examples_per_second)
        (Layout(...), 1280)
        >>> "SingleDevice" in str(plan), "<table" in plan._repr_html_()
        (True, True)
    """

    rows: tuple[Row, ...]
    model: ModelCosts
    machine: MachineCosts
    taken: Row | None = None
    command: str = ""
    notes: tuple[str, ...] = ()
    not_considered: tuple[str, ...] = ()
    history: str = ""

    @functools.cached_property
    def take(self) -> Strategy | None:
        """The strategy of the row to take, for `tfpar.Trainer`; None where no row is taken.

        Raises:
            ValueError: If the plan is for other devices or hosts than those that are there.
        """
        if self.taken is None:
            return None
        from tfpar import cluster, config  # the table needs no TensorFlow
        from tfpar.strategies import from_settings

        layout, settings = self.taken.layout, self.taken.settings
        if not {"device", "devices"} & settings.keys():
            devices = cluster.resolve_devices(None)
            if layout.num_hosts > 1 or layout.devices_per_host > len(devices):
                raise ValueError(
                    f"plan.take is a strategy on the devices that are there, and {layout} needs {layout.num_devices} "
                    f"on {layout.num_hosts} host{'s' * (layout.num_hosts > 1)}, received {len(devices)} on this one. "
                    "Build that strategy where it trains, or plan without num_devices and num_hosts."
                )
            settings = layout.settings_on(devices)
        return from_settings(config.with_layout(config.SingleDevice(), settings))

    @property
    def largest_batches(self) -> dict[str, int]:
        """The largest global batch of each layout that fits, by its name; empty without a limit of memory."""
        return {str(row.layout): row.largest_batch for row in self.rows if row.fits and row.largest_batch}

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
