"""Which devices TensorFlow sees, and whether each of them computes rightly by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.checks.check import Check
from tfpar.checks.child_processes import Outcome, Task, run_tasks
from tfpar.cluster import gpus

_SIGHT_SECONDS, _DEVICE_SECONDS = 60.0, 60.0
_OF_TENSORFLOW = (  # lines that TensorFlow 2.21 prints while it looks for GPUs
    r"Cannot dlopen some GPU libraries[^\n]*",
    r"Could not load dynamic library[^\n]*",
    r"kernel version \S+ does not match[^\n]*",
    r"Could not find cuda drivers[^\n]*",  # cuInit fails after it, too
    r"failed call to cuInit[^\n]*",
    r"CUDA_ERROR_\w+[^\n]*",
)


def see(found: gpus.Found) -> tuple[Check, int]:
    """Return the devices of TensorFlow compared with those of nvidia-smi, and the number of GPUs it can use.

    Args:
        found: The GPUs of `gpus.find`.
    """
    (outcome,) = run_tasks([Task("see", {}, _SIGHT_SECONDS)])
    return judged_sight(found, outcome)


def judged_sight(found: gpus.Found, outcome: Outcome) -> tuple[Check, int]:
    """Return the check of `see` from the end of its task.

    Args:
        found: The GPUs of `gpus.find`.
        outcome: The end of the task `see`.
    """
    if outcome.result is None:
        way_out = "Start python -c 'import tensorflow' by itself, and read its messages."
        if found.gpus:
            way_out = "Below, each GPU is started by itself: leave out those that fail, with CUDA_VISIBLE_DEVICES."
        figure = f"TensorFlow does not start: {outcome.problem}"
        return Check("devices", "WRONG", figure, "", way_out), len(found.gpus)
    seen: dict[str, Any] = outcome.result
    number, wanted = len(seen["started"]), len(found.gpus)
    libraries = f"; CUDA {seen['cuda']}, cuDNN {seen['cudnn']}"
    figure = (
        f"{number} GPU(s): {', '.join(seen['gpus'])}{libraries}" if number else "no GPU: TensorFlow runs on the CPU"
    )
    if number >= wanted:
        return Check("devices", "ok", figure, values=seen), number
    reason, way_out = why_not_seen(found, seen, outcome.errors)
    bound = f"{wanted} GPU(s) of {gpus.VARIABLE if found.is_users else 'nvidia-smi'}"
    return Check("devices", "WRONG", f"{figure}; {reason}", bound, way_out, seen), number


def why_not_seen(found: gpus.Found, seen: Mapping[str, Any], errors: str) -> tuple[str, str]:
    """Return why TensorFlow sees fewer GPUs than nvidia-smi, as a clause, and the way out.

    Args:
        found: The GPUs of `gpus.find`.
        seen: The result of the task `see`.
        errors: What TensorFlow printed.
    """
    if not seen["built_with_cuda"]:
        return "this TensorFlow is built without CUDA", 'Install tfpar[cuda], or pip install "tensorflow[and-cuda]".'
    line = next((match[0] for pattern in _OF_TENSORFLOW if (match := re.search(pattern, errors))), "")
    if "dlopen" in line or "dynamic library" in line:
        way_out = 'Install its CUDA libraries: pip install "tensorflow[and-cuda]".'
        return f"TensorFlow cannot load CUDA's libraries ({line})", way_out
    if "does not match" in line or "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in line:
        return f"driver and its library differ ({line})", "Load the driver again, or restart the machine."
    if "cuda drivers" in line:
        way_out = "In a container, start it with --gpus all; else install NVIDIA's driver."
        return "TensorFlow finds no libcuda.so.1", way_out
    way_out = f"This TensorFlow needs a driver for CUDA {seen['cuda']}: nvidia-smi shows which one yours supports."
    return f"CUDA does not start ({line or 'without a message'})", way_out


def examine(devices: Sequence[str], found: gpus.Found, at_once: int) -> dict[str, Check]:
    """Return for each device whether its product, convolution and XLA-compiled function are right.

    Args:
        devices: Short names.
        found: The GPUs of `gpus.find`, in the order of the devices.
        at_once: How many devices are examined at the same time.
    """
    tasks = [alone("examine", {}, device, found, _DEVICE_SECONDS) for device in devices]
    return {
        device: judged_device(device, outcome)
        for device, outcome in zip(devices, run_tasks(tasks, at_once), strict=True)
    }


def alone(name: str, arguments: Mapping[str, Any], device: str, found: gpus.Found, seconds: float) -> Task:
    """Return a task on one device, in whose process the others are not visible.

    Args:
        name: Of the task; it takes the name of the device.
        arguments: Its other arguments.
        device: A short name.
        found: The GPUs of `gpus.find`.
        seconds: The time limit.
    """
    kind, _, number = device.partition(":")
    if kind == "CPU":
        hidden = {gpus.VARIABLE: "-1"} if found.gpus else {}
        return Task(name, {"device": device, **arguments}, seconds, hidden, int(number) + 1)
    variables = {gpus.VARIABLE: found.gpus[int(number)].name} if int(number) < len(found.gpus) else {}
    return Task(name, {"device": "GPU:0" if variables else device, **arguments}, seconds, variables)


def together(names: Sequence[str], found: gpus.Found) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of a process that starts some GPUs only, and the name there of each, by its name here.

    Args:
        names: Short names of devices.
        found: The GPUs of `gpus.find`.
    """
    numbers = [int(name.partition(":")[2]) for name in names]
    if not names or not names[0].startswith("GPU") or max(numbers) >= len(found.gpus):
        return {}, {name: name for name in names}
    visible = ",".join(found.gpus[number].name for number in numbers)
    return {gpus.VARIABLE: visible}, {name: f"GPU:{index}" for index, name in enumerate(names)}


def judged_device(device: str, outcome: Outcome) -> Check:
    """Return the check of a device from the end of its task.

    Args:
        device: A short name.
        outcome: The end of the task `examine`.
    """
    way_out = f"Leave {device} out of the strategy's devices, and have it examined."
    if outcome.result is None:
        at = f" in the {outcome.stage}" if outcome.stage else ""
        return Check(device, "WRONG", f"{outcome.problem}{at}", f"{_DEVICE_SECONDS:g} s", way_out)
    results: dict[str, Any] = outcome.result
    problems = [text for name, result in results.items() if (text := _problem(name, result))]
    if problems:
        return Check(device, "WRONG", "; ".join(problems), "exact results", way_out, results)
    seconds = sum(result["seconds"] for result in results.values())
    figure = f"{', '.join(results)} right, {seconds:.1f} s with compilation"
    return Check(device, "ok", figure, values=results)


def _problem(name: str, result: Mapping[str, Any]) -> str:
    if "problem" in result:
        return f"the {name} fails: {result['problem']}"
    if result["num_wrong"]:
        wrong, total = result["num_wrong"], result["num_values"]
        return f"the {name} is wrong in {wrong:,} of {total:,} values, by up to {result['largest_error']:.3g}"
    return ""
