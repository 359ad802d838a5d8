"""The number of CPU cores available to this process, which containers and batch systems limit."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def num_allowed_cores() -> int:
    """Return the number of cores available to this process, at least 1.

    Unlike `os.cpu_count()`, it respects the CPU affinity (`taskset`, batch systems) and the CPU quota of the control
    group (containers), rounded up to whole cores.

    Example:
        >>> num_allowed_cores()  # under `taskset -c 0,1`, or `docker run --cpus 2`
        2
    """
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas(ROOT))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control groups and their ancestors."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        # cgroup v2 has one unnamed tree for all controllers; v1 has one tree per controller.
        version_2 = not controllers
        if version_2 or "cpu" in controllers.split(","):
            tree = root / "sys/fs/cgroup" / ("" if version_2 else "cpu")
            folder = tree / name.lstrip("/")
            while folder.is_relative_to(tree):
                # In a container, the group may be mounted as the root, so that its name exists on the host only.
                with contextlib.suppress(OSError, ValueError):
                    yield _quota_2(folder) if version_2 else _quota_1(folder)
                folder = folder.parent


def _quota_2(folder: Path) -> float:
    """Return the quota of a v2 group; raise ValueError for "max", which means no limit."""
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_1(folder: Path) -> float:
    """Return the quota of a v1 group; raise ValueError for -1, which means no limit."""
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota < 0:
        raise ValueError
    return quota / period
