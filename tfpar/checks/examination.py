"""All checks of the doctor in their order, each as soon as it is known."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tfpar.checks import devices, machine, models, together, workers
from tfpar.checks.check import Check
from tfpar.checks.model_source import ModelSource
from tfpar.cluster import cores, gpus


def examine(num_cpus: int = 2, source: ModelSource | None = None, num_workers: int = 1) -> Iterator[Check]:
    """Yield the checks of this machine, of a model, and of workers on this machine.

    Args:
        num_cpus: Without GPUs: the number of logical CPUs that stand for devices.
        source: The model; None without one.
        num_workers: Number of workers that examine the network between them.
    """
    yield from _of_this_machine(num_cpus, source)
    if num_workers > 1:
        yield from workers.check_local(num_workers)


def _of_this_machine(num_cpus: int, source: ModelSource | None) -> Iterator[Check]:
    yield machine.versions()
    yield machine.driver(os.environ)
    yield machine.memory()
    found, problem = _gpus()
    if problem is not None:
        yield problem
    yield machine.shared_memory(is_needed=len(found.gpus) > 1)
    yield from machine.gpu_memory(found)
    sight, num_gpus = devices.see(found)
    yield sight
    if sight.status == "WRONG" and not sight.values and not num_gpus:
        return  # TensorFlow does not start
    names = [f"GPU:{number}" for number in range(num_gpus)] or [f"CPU:{number}" for number in range(num_cpus)]
    at_once = cores.num_allowed_cores()
    each = devices.examine(names, found, at_once)
    yield from each.values()
    right = [name for name in names if each[name].status == "ok"]
    yield from together.measure(right, found)
    if source is None:
        yield Check("model", "skipped", "none is named: --config or --model runs yours on every device")
    else:
        yield from models.check(source, right, found, at_once)


def _gpus() -> tuple[gpus.Found, Check | None]:
    try:
        found = gpus.find(os.environ)
    except ValueError as error:
        return gpus.Found(()), Check("nvidia-smi", "WRONG", str(error))
    if found.problem:
        way_out = "Restart the machine, or have the GPUs examined: nothing can use them as they are."
        return found, Check("nvidia-smi", "WRONG", found.problem, "", way_out)
    return found, None
