"""The cores that a process may use: its affinity, and the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfpar import cluster, config, strategies
from tfpar.cluster import cores

VERSION_2 = {
    "proc/self/cgroup": "0::/pod/app\n",
    "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
# The name is that of the host, and the container sees its group as the root.
IN_CONTAINER = {"proc/self/cgroup": "0::/docker/4f\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [(VERSION_2, 3), (VERSION_1, 2), (IN_CONTAINER, 1), ({}, 16)],
    ids=["version 2", "version 1", "container", "none"],
)
def test_a_quota_limits_the_cores(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert cores.num_allowed_cores() == expected


def test_only_the_cores_of_the_affinity_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores.num_allowed_cores() <= 2


def test_stages_divide_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    shares: list[tuple[int, int | None]] = []
    monkeypatch.setattr(cluster, "use_logical_cpus", lambda number, share: shares.append((number, share)))
    settings = config.Pipeline(num_stages=1, num_microbatches=1, num_logical_cpus=2)
    strategies.from_settings(settings)
    assert shares == [(2, 2)]
