"""Checks of devices: which ones TensorFlow sees, whether each computes correctly, and how they work together."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpar.checks.processes import Outcome, Task, started
from tfpar.checks.report import Check
from tfpar.cluster.gpu import gpus

SECONDS = 60.0
SLOW_FACTORS = {"GPU": 1.1, "CPU": 1.5}  # times the median; logical CPUs share cores with other programs
# Lines that TensorFlow 2.21 prints while it looks for GPUs, their meaning, and the way out.
_NOT_SEEN = (
    (
        "Cannot dlopen some GPU libraries|Could not load dynamic library",
        "TensorFlow cannot load CUDA's libraries",
        'Install its CUDA libraries: pip install "tensorflow[and-cuda]".',
    ),
    (
        r"kernel version \S+ does not match|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "driver and its library differ",
        "Load the driver again, or restart the machine.",
    ),
    (
        "Could not find cuda drivers",  # before "failed call to cuInit", which follows it
        "TensorFlow finds no libcuda.so.1",
        "In a container, start it with --gpus all; else install NVIDIA's driver.",
    ),
    (
        r"failed call to cuInit|CUDA_ERROR_\w+|\Z",
        "CUDA does not start",
        "This TensorFlow needs a driver for CUDA {cuda}: nvidia-smi shows which one yours supports.",
    ),
)
_ALGORITHMS = {
    "nccl": "NCCL",
    "hierarchical_copy": "hierarchical copies",
    "reduction_to_one_device": "reduction to one device",
}


def on_device(
    function: str, device: str, available: gpus.VisibleGpus, seconds: float = SECONDS, **arguments: Any
) -> Task:
    """Return a task on one device, in a process that does not see the other GPUs."""
    kind, _, number = device.partition(":")
    if kind == "CPU":
        hidden = {gpus.VARIABLE: "-1"} if available.gpus else {}
        return Task(function, {"device": device, **arguments}, seconds, hidden, int(number) + 1)
    variables, names = visible([device], available)
    return Task(function, {"device": names[device], **arguments}, seconds, variables)


def visible(devices: Sequence[str], available: gpus.VisibleGpus) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of a process that sees only `devices`, and their names there, by their names here."""
    numbers = [int(name.partition(":")[2]) for name in devices]
    if not devices[0].startswith("GPU") or max(numbers) >= len(available.gpus):
        return {}, {name: name for name in devices}
    variables = {gpus.VARIABLE: ",".join(available.gpus[number].name for number in numbers)}
    return variables, {name: f"GPU:{index}" for index, name in enumerate(devices)}


def seen(available: gpus.VisibleGpus, outcome: Outcome) -> tuple[Check, int]:
    """Compare the devices of TensorFlow with those of nvidia-smi; return the check and the number of usable GPUs."""
    if outcome.result is None:
        way_out = "Start python -c 'import tensorflow' by itself, and read its messages."
        if available.gpus:
            way_out = "Each GPU is started alone below: leave out those that fail, with CUDA_VISIBLE_DEVICES."
        figure = f"TensorFlow does not start: {outcome.problem}"
        return Check("devices", "WRONG", figure, "", way_out), len(available.gpus)
    result: dict[str, Any] = outcome.result
    number, num_available = len(result["started"]), len(available.gpus)
    libraries = f"CUDA {result['cuda']}, cuDNN {result['cudnn']}"
    figure = f"{number} GPU(s): {', '.join(result['gpus'])}; {libraries}"
    figure = figure if number else "no GPU: TensorFlow runs on the CPU"
    if number >= num_available:
        return Check("devices", "ok", figure, values=result), number
    reason, way_out = "this TensorFlow is built without CUDA", "Install tfpar[cuda]."
    if result["built_with_cuda"]:
        reason, way_out = _reason_in(outcome.errors)
    bound = f"{num_available} GPU(s) of {gpus.VARIABLE if available.is_users else 'nvidia-smi'}"
    return Check("devices", "WRONG", f"{figure}; {reason}", bound, way_out.format(**result), result), number


def _reason_in(errors: str) -> tuple[str, str]:
    """Return why TensorFlow sees fewer GPUs than nvidia-smi, and the way out."""
    for pattern, reason, way_out in _NOT_SEEN:
        if match := re.search(f"(?:{pattern})[^\n]*", errors):
            return f"{reason} ({match[0] or 'without a message'})", way_out
    raise AssertionError("the last pattern matches any text")


def each(devices: Sequence[str], available: gpus.VisibleGpus, at_once: int) -> Iterator[Check]:
    """Check the product, convolution and XLA-compiled function of each device."""
    tasks = [on_device("device_tasks.examine", device, available, SECONDS) for device in devices]
    with started(tasks, at_once) as futures:
        for device, future in zip(devices, futures, strict=True):
            yield _examined(device, future.result())


def _examined(device: str, outcome: Outcome) -> Check:
    way_out = f"Leave {device} out of the strategy's devices, and have it examined."
    if outcome.result is None:
        at = f" in the {outcome.stage}" if outcome.stage else ""
        return Check(device, "WRONG", f"{outcome.problem}{at}", f"{SECONDS:g} s", way_out)
    results: dict[str, Any] = outcome.result
    if problems := [text for name, result in results.items() if (text := _problem(name, result))]:
        return Check(device, "WRONG", "; ".join(problems), "exact results", way_out, results)
    seconds = sum(result["seconds"] for result in results.values())
    return Check(device, "ok", f"{', '.join(results)} right, {seconds:.1f} s with compilation", values=results)


def _problem(name: str, result: Mapping[str, Any]) -> str:
    if "problem" in result:
        return f"the {name} fails: {result['problem']}"
    if not result["num_wrong"]:
        return ""
    wrong, total = result["num_wrong"], result["num_values"]
    return f"the {name} is wrong in {wrong:,} of {total:,} values, by up to {result['largest_error']:.3g}"


def together(devices: Sequence[str], available: gpus.VisibleGpus) -> Iterator[Check]:
    """Check the speed of each device, the copies between them, and the all-reduce."""
    if not devices:
        yield Check("speed and copies", "skipped", "no device computes correctly")
        return
    # Devices that failed are hidden: starting them could hang.
    variables, names = visible(devices, available)
    kind = devices[0].partition(":")[0]
    num_cpus = 1 if kind == "GPU" else max(int(name.partition(":")[2]) for name in devices) + 1
    arguments = {"devices": list(names.values()), "slow_factor": SLOW_FACTORS[kind]}
    with started([Task("device_tasks.measure", arguments, SECONDS, variables, num_cpus)]) as (future,):
        yield from measured(future.result(), {name: device for device, name in names.items()})


def measured(outcome: Outcome, names: Mapping[str, str]) -> Iterator[Check]:
    """Yield the checks of `together` from the outcome of its task."""
    if outcome.result is None:
        at, way_out = (f" at {outcome.stage}", f"It stopped at {outcome.stage}.") if outcome.stage else ("", "")
        if re.search("copy|all-reduce", outcome.stage):
            way_out += " Peer-to-peer copies can be switched off with NCCL_P2P_DISABLE=1, or in the BIOS (ACS, IOMMU)."
        yield Check("speed and copies", "WRONG", f"{outcome.problem}{at}", f"{SECONDS:g} s", way_out)
        return
    yield from _speeds({names[device]: seconds for device, seconds in outcome.result["seconds"].items()})
    ends = ("source", "target")
    yield from _copies(
        [{**copy, **{end: names.get(copy[end], copy[end]) for end in ends}} for copy in outcome.result["copies"]]
    )
    yield _all_reduce(outcome.result["all_reduce"], names)


def _speeds(seconds: Mapping[str, float]) -> Iterator[Check]:
    if len(seconds) < 2:
        yield Check("speed", "skipped", "a single device cannot be compared", values=seconds)
        return
    median = statistics.median(seconds.values())
    factor = SLOW_FACTORS[next(iter(seconds)).partition(":")[0]]
    bound = f"{factor - 1:.0%} above the median"
    way_out = "All replicas wait for it. Look at its clocks, heat and power limit, or leave it out of the devices."
    slow = {name: value for name, value in seconds.items() if value > factor * median}
    for name, value in slow.items():
        figure = f"{1e3 * value:.1f} ms, {value / median:.2f} times the median"
        yield Check(f"speed of {name}", "slow", figure, bound, way_out, {"seconds": value, "median_seconds": median})
    if not slow:
        most = max(seconds.values()) / median - 1
        figure = f"the slowest device takes {most:.0%} more than the median of {1e3 * median:.1f} ms"
        yield Check("speed", "ok", figure, bound, values=seconds)


def _copies(copies: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Yield a check for each wrong copy and for each copy with a GPU, and one for all others."""
    num_right = 0
    for copy in copies:
        name = f"copy {copy['source']} to {copy['target']}"
        if copy["num_wrong"]:
            figure = f"{copy['num_wrong']:,} of {copy['num_words']:,} words arrive with other bits"
            way_out = (
                "Training over this pair gives wrong weights. Switch peer-to-peer copies off (ACS or IOMMU in the "
                f"BIOS), or leave {copy['target']} out of the devices."
            )
            yield Check(name, "WRONG", figure, "equal bits", way_out, copy)
        elif "GPU" in name:
            yield Check(name, "ok", f"equal bits, {copy['gb_per_second']:.1f} GB/s", values=copy)
        else:
            num_right += 1
    if num_right:
        yield Check("copies", "ok", f"equal bits in {num_right} ordered pairs of logical CPUs")
    if not copies:
        yield Check("copies", "skipped", "there is no other device to copy to")


def _all_reduce(result: Mapping[str, Any] | None, names: Mapping[str, str]) -> Check:
    if result is None:
        return Check("all-reduce", "skipped", "a single device needs no all-reduce")
    algorithm = _ALGORITHMS.get(result["algorithm"], result["algorithm"])
    if wrong := sorted({names[device] for row in result["sizes"] for device in row["wrong"]}):
        way_out = f"Leave {', '.join(wrong)} out of the strategy's devices, and have it examined."
        if result["algorithm"] == "nccl":
            way_out = "Try NCCL_P2P_DISABLE=1, and Mirrored(all_reduce='hierarchical_copy')."
        return Check("all-reduce", "WRONG", f"wrong sums by {algorithm} on {', '.join(wrong)}", "", way_out, result)
    times = (f"{_size(row['num_bytes'])} in {1e3 * row['seconds']:.2f} ms" for row in result["sizes"])
    return Check("all-reduce", "ok", f"{algorithm}: {', '.join(times)}", values=result)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"
