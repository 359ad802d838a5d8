"""The layout of a run with `strategy.kind = "auto"` on several devices: the first row of a plan."""

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
    """What a run trains with.

    Args:
        run: The run under its layout.
        note: The end of the line `strategy` of the header; "" where the user has chosen the layout.
    """

    run: config.Run
    note: str = ""


def choose(run: config.Run, directory: RunDirectory) -> Choice:
    """Return a run under the layout that it trains with, before TensorFlow starts.

    With `strategy.kind = "auto"` and several devices that is the first row of the plan in the folder of the run, of an
    earlier `python -m tfpar.plan` of the same run on these devices, or else of one that is measured now, in processes
    of its own. All other runs stay as they are.

    Args:
        run: The run.
        directory: Its folder, claimed.

    Raises:
        ValueError: If no layout could be measured, or the model or the data are wrong.
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
    """Return a plan for these devices: that of a run to resume, or an earlier command's."""
    resumed = stored_plans.read(directory.path / stored_plans.NAME) if directory.resumed is not None else None
    if resumed is not None:
        there = {"kind": devices.kind, "number": len(devices.names)}
        if {name: resumed["devices"].get(name) for name in there} == there:
            return resumed
    return stored_plans.read(stored_plans.path_of(run, devices))


def _measured_plan(run: config.Run, devices: PlanDevices) -> dict[str, Any]:
    way_out = 'Correct it, or set strategy.kind to another kind than "auto", which needs no plan.'
    try:
        plan = plan_run.plan_of(run, devices, USUAL_BUDGET_SECONDS)
    except ValueError as error:
        raise ValueError(f"{error} {way_out}") from error
    assert plan is not None, "a process alone is the chief"
    if plan.best is None:
        reasons = "; ".join(f"{layout}: {reason}" for layout, reason in plan.others[:3])
        raise ValueError(f'strategy.kind = "auto" needs a layout that trains, and none did ({reasons}). {way_out}')
    table: dict[str, Any] = json.loads(plan.to_json())
    return table
