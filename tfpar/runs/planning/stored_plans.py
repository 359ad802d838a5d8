"""Stored plans, reused for the same configuration, devices, code and versions."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.cluster import cores
from tfpar.cluster.gpu import gpus
from tfpar.files import atomic_file, json_file
from tfpar.runs.planning.plan_devices import PlanDevices

FOLDER = Path("runs", ".plans")
NAME = "plan.json"  # in a run directory
# Settings that do not affect the duration of a step.
_OTHER_SECTIONS = frozenset({"strategy", "callbacks"})
_OTHER_TRAINING = frozenset(
    {"epochs", "steps_per_call", "validation_freq", "nonfinite_loss", "checkpoint_seconds", "keep_checkpoints"}
)


def plan_path(run: config.Run, devices: PlanDevices, num_workers: int = 1) -> Path:
    """Return the file of a run's plan.

    Its name is a hash of the settings that affect the duration of a step, the code of the trainer, the devices and the
    versions.

    Args:
        run: The run.
        devices: The devices of each worker.
        num_workers: Number of workers.
    """
    settings = {name: value for name, value in run.model_dump(mode="json").items() if name not in _OTHER_SECTIONS}
    settings["training"] = {name: value for name, value in settings["training"].items() if name not in _OTHER_TRAINING}
    # Strategy settings that apply to every layout, such as `batch_dependent_layers`.
    settings["strategy"] = config.with_layout(run.strategy, {"kind": "multi_worker"}).model_dump(mode="json")
    versions = [importlib.metadata.version(name) for name in ("tensorflow", "keras", "tfpar")]
    parts = [settings, _trainer_code(run.trainer), _machine(devices), num_workers, versions]
    key = json.dumps(parts, sort_keys=True, default=str)
    return FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _machine(devices: PlanDevices) -> list[str]:
    """Return what identifies the machine: the devices, host, cores, and the identities of GPUs."""
    cards = gpus.identities(os.environ) if devices.kind == "GPU" else []
    machine = [platform.node(), platform.machine(), str(cores.num_allowed_cores())]
    return [*devices.names, str(devices.are_named), *machine, *cards]


def _trainer_code(trainer: str) -> str:
    """Return the code of a trainer class without importing it, which may start TensorFlow."""
    module = trainer.rpartition(".")[0]
    paths = [Path(*module.split(".")).with_suffix(".py")]  # in the current folder, as the train command finds it
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        paths.insert(0, Path(spec.origin if spec is not None and spec.origin else "."))
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            return path.read_text()
    return ""


def store(path: Path, text: str) -> None:
    """Store a plan as JSON, ignoring write errors."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(path, text)


def read(path: Path) -> dict[str, Any] | None:
    """Read a stored plan; return None if the file is missing or holds something else."""
    table = json_file.read_table(path)
    return table if table is not None and is_plan(table) else None


def is_plan(table: dict[str, Any]) -> bool:
    """Return whether a JSON table is a plan with a best layout.

    Example:
        >>> is_plan({"rows": []})
        False
    """
    rows, devices = table.get("rows"), table.get("devices")
    return isinstance(rows, list) and bool(rows) and all(map(_is_row, rows)) and isinstance(devices, dict)


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("layout"), str)
        and isinstance(row.get("settings"), dict)
        and isinstance(row.get("step_seconds"), int | float)
    )
