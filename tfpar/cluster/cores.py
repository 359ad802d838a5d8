"""The number of cores that this process may use: fewer than the machine has in a container or on a shared machine."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def num_allowed_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    `os.cpu_count()` counts the cores of the machine. A batch system or `taskset` restricts a process to some of them
    (its affinity), a container to a share of their time (the quota of its control group, rounded up to whole cores).

    Example:
        >>> num_allowed_cores()  # under `taskset -c 0,1`, or `docker run --cpus 2`
        2
    """
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas(ROOT))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits, in cores, of the control groups of this process and of those above them.

    Args:
        root: The folder that holds `proc` and `sys`.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        # Version 2 has one tree for all controllers, without names; version 1 one for each.
        version_2 = not controllers
        if version_2 or "cpu" in controllers.split(","):
            tree = root / "sys/fs/cgroup" / ("" if version_2 else "cpu")
            folder = tree / name.lstrip("/")
            while folder.is_relative_to(tree):
                # In a container its own group may be the root, and its name valid on the host only.
                with contextlib.suppress(OSError, ValueError):
                    yield _quota_2(folder) if version_2 else _quota_1(folder)
                folder = folder.parent


def _quota_2(folder: Path) -> float:
    """Return the limit of a group of version 2; raise ValueError for "max", no limit."""
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_1(folder: Path) -> float:
    """Return the limit of a group of version 1; raise ValueError for -1, no limit."""
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota < 0:
        raise ValueError
    return quota / period
