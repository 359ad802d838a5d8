"""The layout of a run with `strategy.kind = "auto"`: on several devices, the best one of a plan."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from tfpar import config
from tfpar.cluster import tf_config
from tfpar.files import atomic_file
from tfpar.messages.number_format import duration
from tfpar.planning.search import USUAL_BUDGET_SECONDS
from tfpar.runs.directory import RunDirectory
from tfpar.runs.planning import plan_run, stored_plans
from tfpar.runs.planning.plan_devices import PlanDevices, planned_devices
from tfpar.runs.planning.plan_files import with_strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """The layout that a run trains with.

    Args:
        run: The run with the settings of the layout.
        note: What to append to the line `strategy` of the header; empty if the user chose the layout.
    """

    run: config.Run
    note: str = ""


def choose(run: config.Run, directory: RunDirectory) -> Choice:
    """Return the run with the layout to train with, before TensorFlow starts.

    With `strategy.kind = "auto"` and several devices, it is the best layout of the plan in the run directory, of an
    earlier `python -m tfpar.plan` for the same run and devices, or of a plan measured now in subprocesses. Other runs
    are unchanged.

    Args:
        run: The run.
        directory: The claimed run directory.

    Raises:
        ValueError: If no layout could be measured, or the model or the data are invalid.
    """
    job = tf_config.from_environment(os.environ)
    if not isinstance(run.strategy, config.Auto) or (job is not None and job.num_workers > 1):
        return Choice(run)
    devices = planned_devices(run.strategy)
    if len(devices.names) == 1:
        return Choice(run)
    plan = _known_plan(run, directory, devices) or _measured_plan(run, devices)
    atomic_file.write(directory.path / stored_plans.NAME, json.dumps(plan, indent=2) + "\n")
    row = plan["rows"][0]
    note = f", chosen by the planner: {duration(row['step_seconds'])} a step; python -m tfpar.plan shows all"
    return Choice(with_strategy(run, row["settings"]), note)


def _known_plan(run: config.Run, directory: RunDirectory, devices: PlanDevices) -> dict[str, Any] | None:
    """Return a plan for these devices, from the resumed run or an earlier command."""
    resumed = stored_plans.read(directory.path / stored_plans.NAME) if directory.resumed is not None else None
    if resumed is not None:
        available = {"kind": devices.kind, "number": len(devices.names)}
        if {name: resumed["devices"].get(name) for name in available} == available:
            return resumed
    return stored_plans.read(stored_plans.plan_path(run, devices))


def _measured_plan(run: config.Run, devices: PlanDevices) -> dict[str, Any]:
    way_out = 'Correct it, or set strategy.kind to another kind than "auto", which needs no plan.'
    try:
        plan = plan_run.make_plan(run, devices, USUAL_BUDGET_SECONDS)
    except ValueError as error:
        raise ValueError(f"{error} {way_out}") from error
    assert plan is not None, "a process alone is the chief"
    if plan.best is None:
        reasons = "; ".join(f"{layout}: {reason}" for layout, reason in plan.others[:3])
        raise ValueError(f'strategy.kind = "auto" needs a layout that trains, and none did ({reasons}). {way_out}')
    table: dict[str, Any] = json.loads(plan.to_json())
    return table
