"""Plans of earlier commands: of one configuration, on one machine, with one version of everything; no TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.files import atomic_file, json_file
from tfpar.planning.history import machine_name

FOLDER = Path("runs", ".plans")
NAME = "plan.json"  # in the folder of a run
# What does not change a step.
_OTHER_SECTIONS = frozenset({"strategy", "callbacks"})
_OTHER_TRAINING = frozenset(
    {"epochs", "steps_per_call", "validation_freq", "nonfinite_loss", "checkpoint_seconds", "keep_checkpoints"}
)


def path_of(run: config.Run, device: str, *, is_stated: bool = False) -> Path:
    """Return the file of a run's plan.

    Args:
        run: The run; its strategy, callbacks and number of epochs do not count, but the code of its trainer does.
        device: The kind of the devices, "CPU" or "GPU".
        is_stated: Whether the plan is for a stated memory or number of devices or of measured layouts. It predicts the
            steps of its layouts, and is no choice for all the devices that are there.
    """
    settings = {name: one for name, one in run.model_dump(mode="json").items() if name not in _OTHER_SECTIONS}
    settings["training"] = {name: one for name, one in settings["training"].items() if name not in _OTHER_TRAINING}
    versions = [importlib.metadata.version(name) for name in ("tensorflow", "keras", "tfpar")]
    key = json.dumps([settings, _code_of(run.trainer), machine_name(device), versions], sort_keys=True, default=str)
    ending = ".stated.json" if is_stated else ".json"
    return FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{ending}"


def newest_first(run: config.Run, device: str) -> list[dict[str, Any]]:
    """Return the stored plans of a run, that of the last command first.

    Args:
        run: The run.
        device: The kind of the devices, "CPU" or "GPU".
    """
    paths = [path_of(run, device, is_stated=is_stated) for is_stated in (False, True)]
    found = [(_seconds_of(path), plan) for path in paths if (plan := read(path)) is not None]
    return [plan for _, plan in sorted(found, key=lambda one: one[0], reverse=True)]


def _seconds_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed in this moment
        return 0.0


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
    """Return whether a table holds a plan, with all that is read of it.

    Args:
        table: A table of JSON.

    Example:
        >>> is_plan({"rows": []})
        False
    """
    rows, measured = table.get("rows"), table.get("measured")
    return (
        isinstance(rows, list)
        and all(map(_is_row, rows))
        and isinstance(measured, dict)
        and isinstance(measured.get("device"), str)
        and isinstance(measured.get("num_devices"), int)
        and isinstance(table.get("notes"), list)
        and isinstance(table.get("take"), str | None)
    )


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("layout"), str)
        and isinstance(row.get("settings"), dict)
        and isinstance(row.get("fits"), bool | None)
        and isinstance(row.get("measured_seconds"), int | float | None)
        and all(isinstance(row.get(name), int | float) for name in ("step_seconds", "memory_bytes"))
    )


def to_text(table: dict[str, Any]) -> str:
    """Return a plan as the text of its file.

    Args:
        table: The plan.
    """
    return json.dumps(table, indent=2) + "\n"


def row_of(table: dict[str, Any], layout: str) -> dict[str, Any] | None:
    """Return the row of a layout in a plan; None if it has none.

    Args:
        table: A plan.
        layout: The name of the layout.
    """
    return next((row for row in table["rows"] if row["layout"] == layout), None)
