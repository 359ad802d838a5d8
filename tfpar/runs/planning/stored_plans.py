"""Plans of earlier commands: of one configuration, on the same devices, with one version of everything."""

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
NAME = "plan.json"  # in the folder of a run
# What does not change a step.
_OTHER_SECTIONS = frozenset({"strategy", "callbacks"})
_OTHER_TRAINING = frozenset(
    {"epochs", "steps_per_call", "validation_freq", "nonfinite_loss", "checkpoint_seconds", "keep_checkpoints"}
)


def path_of(run: config.Run, devices: PlanDevices, num_workers: int = 1) -> Path:
    """Return the file of a run's plan.

    Args:
        run: The run; its layout, callbacks and number of epochs do not count, but the code of its trainer does.
        devices: The devices of each worker.
        num_workers: Number of workers.
    """
    settings = {name: value for name, value in run.model_dump(mode="json").items() if name not in _OTHER_SECTIONS}
    settings["training"] = {name: value for name, value in settings["training"].items() if name not in _OTHER_TRAINING}
    # The settings of any layout, such as those for layers that mix the examples of a batch.
    settings["strategy"] = config.with_layout(run.strategy, {"kind": "multi_worker"}).model_dump(mode="json")
    versions = [importlib.metadata.version(name) for name in ("tensorflow", "keras", "tfpar")]
    parts = [settings, _code_of(run.trainer), _machine(devices), num_workers, versions]
    key = json.dumps(parts, sort_keys=True, default=str)
    return FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _machine(devices: PlanDevices) -> list[str]:
    """Return what is known of the devices: of a CPU the machine and its cores, of GPUs their identities too."""
    cards = gpus.identities(os.environ) if devices.kind == "GPU" else []
    machine = [platform.node(), platform.machine(), str(cores.num_allowed_cores())]
    return [*devices.names, str(devices.are_named), *machine, *cards]


def _code_of(trainer: str) -> str:
    """Return the code of a trainer class without running it: it may start TensorFlow."""
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
    """Store a plan; where nothing can be written, nothing is.

    Args:
        path: Its file.
        text: The plan as JSON.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(path, text)


def read(path: Path) -> dict[str, Any] | None:
    """Return a stored plan; None if there is none, or the file holds something else.

    Args:
        path: Its file.
    """
    table = json_file.read_table(path)
    return table if table is not None and is_plan(table) else None


def is_plan(table: dict[str, Any]) -> bool:
    """Return whether a table holds a plan with a best layout, with all that is read of it.

    Args:
        table: A table of JSON.

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
