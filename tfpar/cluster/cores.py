"""How many cores this process may use, which on a shared machine or in a container is less than the machine has."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def num_allowed_cores() -> int:
    """Return how many cores this process may use, at least 1.

    `os.cpu_count()` counts those of the machine. A batch system or `taskset` allows some of them (the affinity), a
    container a share of their time (the quota of its control group; part of a core counts as one).

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
                # A container may see its own group as the root, under a name that only the host knows.
                with contextlib.suppress(OSError, ValueError):
                    yield _quota_2(folder) if version_2 else _quota_1(folder)
                folder = folder.parent


def _quota_2(folder: Path) -> float:
    """Return the limit of a group of version 2; raises ValueError for "max", which is none."""
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_1(folder: Path) -> float:
    """Return the limit of a group of version 1; raises ValueError for -1, which is none."""
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota < 0:
        raise ValueError
    return quota / period
