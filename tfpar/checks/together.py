"""Several devices together: whether one is slow, and whether copies and all-reduces arrive as they were sent."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.checks import devices as device_checks
from tfpar.checks.check import Check
from tfpar.checks.child_processes import Outcome, Task, run_tasks
from tfpar.cluster import gpus

SLOW_FACTORS = {"GPU": 1.1, "CPU": 1.5}  # of the median; logical CPUs share cores with each other and other programs
_SECONDS = 60.0
_ALGORITHMS = {
    "nccl": "NCCL",
    "hierarchical_copy": "hierarchical copies",
    "reduction_to_one_device": "reduction to one device",
}


def measure(devices: Sequence[str], found: gpus.Found) -> list[Check]:
    """Return the speed of each device, the copies between each ordered pair, and the all-reduce by size.

    Args:
        devices: Short names of devices that compute rightly by themselves.
        found: The GPUs of `gpus.find`.
    """
    if not devices:
        return [Check("speed and copies", "skipped", "no device computes rightly by itself")]
    kind = devices[0].partition(":")[0]
    # Without those that fail: to start them could hang.
    variables, names = device_checks.together(devices, found)
    num_cpus = 1 if kind == "GPU" else max(int(name.partition(":")[2]) for name in devices) + 1
    arguments = {"devices": list(names.values()), "slow_factor": SLOW_FACTORS[kind]}
    (outcome,) = run_tasks([Task("measure", arguments, _SECONDS, variables, num_cpus)])
    return judged(outcome, {name: device for device, name in names.items()})


def judged(outcome: Outcome, names: Mapping[str, str]) -> list[Check]:
    """Return the checks of `measure` from the end of its task.

    Args:
        outcome: The end of the task.
        names: The name of each device here, by its name in the task.
    """
    if outcome.result is None:
        at = f" at {outcome.stage}" if outcome.stage else ""
        return [Check("speed and copies", "WRONG", f"{outcome.problem}{at}", f"{_SECONDS:g} s", _out_of(outcome.stage))]
    result: dict[str, Any] = outcome.result
    seconds = {names[device]: value for device, value in result["seconds"].items()}
    copies = [
        {**one, **{end: names.get(one[end], one[end]) for end in ("source", "target")}} for one in result["copies"]
    ]
    return [*_speeds(seconds), *_copies(copies), *_all_reduces(result["all_reduce"], names)]


def _out_of(stage: str) -> str:
    where = f"It stopped at {stage}. " if stage else ""
    if not re.search("copy|all-reduce", stage):
        return where.rstrip()
    return f"{where}Peer-to-peer copies can be switched off with NCCL_P2P_DISABLE=1, or in the BIOS (ACS, IOMMU)."


def _speeds(seconds: Mapping[str, float]) -> list[Check]:
    if len(seconds) < 2:
        return [Check("speed", "skipped", "one device has no other to be compared with", values=dict(seconds))]
    median = statistics.median(seconds.values())
    factor = SLOW_FACTORS[next(iter(seconds)).partition(":")[0]]
    slow = {name: value for name, value in seconds.items() if value > factor * median}
    bound = f"{factor - 1:.0%} above the median"
    if not slow:
        most = max(seconds.values()) / median - 1
        figure = f"the slowest device takes {most:.0%} more than the median of {1e3 * median:.1f} ms"
        return [Check("speed", "ok", figure, bound, values=dict(seconds))]
    way_out = "All replicas wait for it. Look at its clocks, heat and power limit, or leave it out of the devices."
    return [
        Check(
            f"speed of {name}",
            "slow",
            f"{1e3 * value:.1f} ms, {value / median:.2f} times the median",
            bound,
            way_out,
            {"seconds": value, "median_seconds": median},
        )
        for name, value in slow.items()
    ]


def _copies(copies: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return a line for each copy that is wrong, and one for the others; with GPUs, a line for each pair."""
    found = []
    for one in copies:
        name = f"{one['source']} to {one['target']}"
        if one["num_wrong"]:
            figure = f"{one['num_wrong']:,} of {one['num_words']:,} words arrive with other bits"
            way_out = (
                "Training over this pair gives wrong weights. Switch peer-to-peer copies off (ACS or IOMMU in the "
                f"BIOS), or leave {one['target']} out of the devices."
            )
            found.append(Check(f"copy {name}", "WRONG", figure, "equal bits", way_out, dict(one)))
        elif "GPU" in name:
            found.append(Check(f"copy {name}", "ok", f"equal bits, {one['gb_per_second']:.1f} GB/s", values=dict(one)))
    on_cpus = [one for one in copies if not one["num_wrong"] and "GPU" not in f"{one['source']}{one['target']}"]
    if on_cpus:
        found.append(Check("copies", "ok", f"equal bits in {len(on_cpus)} ordered pairs of logical CPUs"))
    return found or [Check("copies", "skipped", "one device has no other to copy to")]


def _all_reduces(result: Mapping[str, Any] | None, names: Mapping[str, str]) -> list[Check]:
    if result is None:
        return [Check("all-reduce", "skipped", "one device sums nothing")]
    wrong = sorted({names[device] for one in result["sizes"] for device in one["wrong"]})
    algorithm = _ALGORITHMS.get(result["algorithm"], result["algorithm"])
    if wrong:
        way_out = f"Leave {', '.join(wrong)} out of the strategy's devices, and have it examined."
        if result["algorithm"] == "nccl":
            way_out = "Try NCCL_P2P_DISABLE=1, and Mirrored(all_reduce='hierarchical_copy')."
        return [Check("all-reduce", "WRONG", f"wrong sums by {algorithm} on {', '.join(wrong)}", "", way_out, result)]
    times = ", ".join(f"{_size(one['num_bytes'])} in {1e3 * one['seconds']:.2f} ms" for one in result["sizes"])
    return [Check("all-reduce", "ok", f"{algorithm}: {times}", values=result)]


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"
