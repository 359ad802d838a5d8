"""The layout of a run with `strategy.kind = "auto"` on several devices: the first row of a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfpar import cluster, config
from tfpar.cluster import cores, tf_config
from tfpar.files import atomic_file
from tfpar.planning.history import has_equal_devices, num_divided
from tfpar.planning.planner import progress
from tfpar.planning.quantities import duration
from tfpar.runs import plan_program, stored_plans
from tfpar.runs.directory import RunDirectory
from tfpar.runs.plan_files import with_strategy


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
    earlier `python -m tfpar.plan` of the same run on this machine, or else of one that is measured now, in a process of
    its own. All other runs stay as they are; a stored plan is copied to the folder of the run, for its report.

    Args:
        run: The run.
        directory: Its folder, claimed.

    Raises:
        ValueError: If no layout fits in the memory of a device, or the planner refuses the run.
    """
    job = tf_config.from_environment(os.environ)
    if job is not None and job.num_workers > 1:
        return Choice(run)
    strategy = run.strategy
    if not isinstance(strategy, config.Auto):
        _copy_plan(run, directory)
        return Choice(run)
    kind, number = _devices(strategy)
    if number == 1:
        return Choice(run)
    plan = _known_plan(run, directory, kind, number) or _measured_plan(run, number)
    atomic_file.write(directory.path / stored_plans.NAME, stored_plans.to_text(plan))
    return _taken(run, plan)


def _copy_plan(run: config.Run, directory: RunDirectory) -> None:
    """Copy the plan of an earlier command into the folder of a run, where it is compared with what ran.

    Of several plans it is the last one that has the layout of the run, with its settings as the planner writes them.
    """
    path = directory.path / stored_plans.NAME
    if directory.resumed is not None or path.exists():
        return
    kind = cluster.configured_devices(None)[0].partition(":")[0]
    plans = stored_plans.newest_first(run, kind)
    if plans:
        most = max(plans, key=lambda plan: len(plan["rows"]))  # a layout chosen by hand has settings of its own
        number = len(cluster.configured_devices(None))
        own = next((plan for plan in plans if _has_layout_of(run, plan, number)), most)
        atomic_file.write(path, stored_plans.to_text(own))


def _has_layout_of(run: config.Run, plan: dict[str, Any], number: int) -> bool:
    """Return whether a row of a plan is the layout and the settings of a run, where `number` devices are there."""
    is_of_all = plan["measured"]["device"] == "CPU" or plan["measured"]["num_devices"] == number
    for row in plan["rows"]:
        settings = row["settings"]
        if not is_of_all and settings["kind"] == "mirrored" and "devices" not in settings:
            continue  # replicas on all devices, of which there were others
        with contextlib.suppress(ValueError, KeyError):
            if config.with_layout(run.strategy, settings) == run.strategy:
                return True
    return False


def _devices(strategy: config.Auto) -> tuple[str, int]:
    """Return kind and number of the devices to choose from."""
    names = cluster.configured_devices(strategy.devices)
    kind = names[0].partition(":")[0]
    if strategy.devices is None and kind == "CPU":  # split by the strategy, or not at all
        return kind, strategy.num_logical_cpus
    return kind, len(names)


def _known_plan(run: config.Run, directory: RunDirectory, kind: str, number: int) -> dict[str, Any] | None:
    """Return a plan for the devices that are there: that of a run to resume, or an earlier command's."""
    resumed = [directory.path / stored_plans.NAME] if directory.resumed is not None else []
    for path in (*resumed, stored_plans.path_of(run, kind)):
        plan = stored_plans.read(path)
        if plan is not None and (plan["measured"]["device"], plan["measured"]["num_devices"]) == (kind, number):
            return plan
    return None


def _measured_plan(run: config.Run, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfpar-plan-") as folder:
        file, result = Path(folder, "run.toml"), Path(folder, "plan.json")
        file.write_text(config.dump(run))
        words = [sys.executable, "-m", plan_program.__name__, str(file), str(result), str(number)]
        with progress(f"planning: measuring the model on {number} devices ..."):
            ended = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        plan = stored_plans.read(result)
    if plan is None:
        raise ValueError(_problem(ended))
    return plan


def _problem(ended: subprocess.CompletedProcess[str]) -> str:
    way_out = 'Correct it, or set strategy.kind to another kind than "auto", which needs no plan.'
    if ended.returncode == plan_program.FAILED:
        return f"{ended.stderr.strip()} {way_out}"
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        f'strategy.kind = "auto" measures the model in a process of its own, which ended with {ended.returncode}: '
        f"{last:.200} {way_out}"
    )


def _taken(run: config.Run, plan: dict[str, Any]) -> Choice:
    """Return the run under the layout that a plan takes; under Mirrored where the plan could not rank."""
    row = None if plan["take"] is None else stored_plans.row_of(plan, plan["take"])
    if row is not None:
        settings = dict(row["settings"])
        num_logical_cpus = getattr(run.strategy, "num_logical_cpus", 1)
        if "devices" in settings and num_logical_cpus > 1:
            settings["num_logical_cpus"] = num_logical_cpus
        measured = row.get("measured_seconds")
        step = (
            f"{duration(row['step_seconds'])} a step predicted" if measured is None else f"{duration(measured)} a step"
        )
        note = (
            f", chosen by the planner: {step}{_cores(plan, num_logical_cpus, settings)}; python -m tfpar.plan shows all"
        )
        return Choice(with_strategy(run, settings), note)
    if any(row["fits"] is not False for row in plan["rows"]):
        return Choice(run, ", as the measurement of the planner was too noisy to choose")
    raise ValueError(
        f"{' '.join(plan['notes'])} Use a smaller training.global_batch_size, or set strategy.kind to another kind "
        'than "auto", which is trained without a plan.'
    )


def _cores(plan: dict[str, Any], num_logical_cpus: int, settings: dict[str, Any]) -> str:
    """Return in words the cores of a planned device, where the run splits the CPU into fewer devices."""
    measured, num_cores = plan["measured"], cores.num_allowed_cores()
    num_planned = num_divided(measured)
    num_used = len(settings.get("devices", ())) or settings.get("num_logical_cpus", 1)
    if num_logical_cpus == 1 or has_equal_devices(measured["device"], num_planned, num_used, num_cores):
        return ""
    of_device = max(1, num_cores // num_planned)
    return f" on devices of {of_device} core{'s' * (of_device > 1)}"
