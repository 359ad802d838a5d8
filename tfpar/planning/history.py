"""How well earlier runs of this machine were predicted, from the `prediction.json` in their folders; no TensorFlow."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfpar.cluster import cores
from tfpar.files import atomic_file
from tfpar.planning.ranking import UNTESTED

NAME = "prediction.json"
_MOST_RUNS, _MOST_BYTES = 1000, 1 << 16


def machine_name(device: str) -> str:
    """Return the name by which runs of one machine are recognized.

    Args:
        device: The kind of its devices: "CPU" or "GPU".

    Example:
        >>> machine_name("CPU").split(", ")[2]  # "node1, 2 cores, CPU" on a machine named node1
        'CPU'
    """
    number = cores.num_allowed_cores()
    return f"{platform.node()}, {number} core{'s' * (number > 1)}, {device}"


def num_divided(measured: Mapping[str, Any]) -> int:
    """Return the number of devices into which the measurement of a plan divided the host.

    Args:
        measured: Of a stored plan.

    Example:
        >>> num_divided({"num_devices": 8, "num_measured": 2}), num_divided({"num_devices": 2})
        (2, 2)
    """
    return int(measured.get("num_measured") or measured["num_devices"])


def has_equal_devices(kind: str, num_planned: int, num_used: int, num_cores: int) -> bool:
    """Return whether a device of a run is one of those that its plan measured, so that their steps can be compared.

    GPUs are always. Logical CPUs divide the cores: one device of a plan for two has half of those that a run on one
    device has.

    Args:
        kind: The kind of the devices: "CPU" or "GPU".
        num_planned: Devices that the plan measured.
        num_used: Devices of the run, on one host.
        num_cores: Cores that the process may use.

    Example:
        >>> has_equal_devices("CPU", 2, 2, num_cores=8), has_equal_devices("CPU", 2, 1, num_cores=8)
        (True, False)
    """
    return kind != "CPU" or max(1, num_cores // num_planned) == max(1, num_cores // num_used)


def history(folder: Path, machine: str) -> str:
    """Return in words how well the planner predicted the runs of a machine.

    The previewed step of a pipeline is that of another predictor, and does not count. Files that cannot be read, or
    that hold something else, are left out.

    Args:
        folder: The folder of the runs' folders, which need not exist.
        machine: The name of the machine.

    Example:
        >>> history(Path("no_such_folder"), "node1")
        'no run of this machine has tested the prediction yet'
    """
    records = [record for record in _records(folder) if record.get("machine") == machine]
    times = _errors(records, "step_seconds")
    if not times:
        return UNTESTED
    number = f"{len(times)} run{'s' * (len(times) > 1)} of this machine"
    sizes = [abs(error) for error in times]
    said = (
        f"error of the prediction in {number}: time {_percent(statistics.median(sizes))} (worst {_percent(max(sizes))})"
    )
    if memory := _errors(records, "memory_bytes"):
        said += f", memory {_signed(min(memory))} to {_signed(max(memory))}"
    return said


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_RUNS)]
    except OSError:
        return
    for name in names:
        try:
            record = json.loads(atomic_file.read(folder / name / NAME, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _errors(records: list[dict[str, Any]], name: str) -> list[float]:
    """Return the relative errors of predictions: 0.04 for one that is 4 % too high."""
    pairs = ((_size(record.get(f"planned_{name}")), _size(record.get(f"measured_{name}"))) for record in records)
    return [planned / measured - 1 for planned, measured in pairs if planned and measured]


def _size(value: Any) -> float:
    """Return a number above 0; 0 for anything else."""
    is_size = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if is_size else 0.0


def _percent(error: float) -> str:
    return f"{100 * error:.0f} %"


def _signed(error: float) -> str:
    return f"{100 * error:+.0f} %"
