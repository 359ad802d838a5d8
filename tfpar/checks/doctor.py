"""The function `tfpar.doctor`: all checks, in order."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.checks import devices, machine, models, workers
from tfpar.checks.models import ModelSource
from tfpar.checks.processes import Task, started
from tfpar.checks.report import Check, reported
from tfpar.cluster import cores
from tfpar.cluster.gpu import gpus
from tfpar.config import bundled_configurations


def doctor(
    build_model: Callable[[], Any] | None = None,
    dataset: Any = None,
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    num_logical_cpus: int = 2,
    num_workers: int = 1,
    verbose: int = 1,
) -> list[Check]:
    """Check this machine, its devices and a model, as `python -m tfpar.doctor` does.

    Each device is checked in subprocesses with time limits. Call it at the beginning of a program, before TensorFlow
    allocates the memory of the GPUs in this process.

    Args:
        build_model: A model function, which the subprocesses import from its file. Defaults to no model.
        dataset: Batches `(inputs, targets)` or `(inputs, targets, sample_weights)`; the first is used. By default, a
            batch is made up.
        config: The name of a configuration, or a TOML file, instead of a model function.
        overrides: Settings of the configuration, such as `"training.epochs=3"`.
        num_logical_cpus: Number of logical CPUs to check if there are no GPUs.
        num_workers: Number of local workers to start, to check the network between them.
        verbose: 1 to print each check when it completes, 0 to print nothing.

    Returns:
        The results of all checks.

    Raises:
        ValueError: If the configuration is invalid, or the model function cannot be imported by another process.

    Example:
        >>> checks = tfpar.doctor(verbose=0)
        >>> [check.name for check in checks if check.status == "WRONG"]
        []
    """
    batch, source = None, None
    if dataset is not None:
        from tfpar.checks.model_tasks import first_batch  # imports TensorFlow

        batch = first_batch(dataset)
    if build_model is not None:
        source = ModelSource(None, tuple(overrides), _import_name(build_model), batch=batch)
    elif config is not None:
        source = ModelSource(str(bundled_configurations.find(config)), tuple(overrides))
    return reported(examine(num_logical_cpus, source, num_workers), "text" if verbose else "nothing")


def _import_name(function: Callable[[], Any]) -> str:
    """Return the name by which another process can import a function."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if not name.isidentifier() or not hasattr(module, "__file__") or getattr(module, name, None) is not function:
        raise ValueError(
            f"tfpar.doctor runs the model function in other processes, which import it, and {function!r:.100} is not a "
            "function of a file. Move it to a file, as a function of its own."
        )
    return f"{inspect.getsourcefile(function)}:{name}"


def examine(num_logical_cpus: int = 2, source: ModelSource | None = None, num_workers: int = 1) -> Iterator[Check]:
    """Yield each check when it completes, as `doctor` does.

    Args:
        num_logical_cpus: Number of logical CPUs to check if there are no GPUs.
        source: The model to check, if any.
        num_workers: Number of local workers to check the network between.

    Raises:
        ValueError: If the configuration of the model is invalid; raised before the first check.
    """
    if source is not None:
        source.run()
    return _examined(num_logical_cpus, source, num_workers)


def _examined(num_logical_cpus: int, source: ModelSource | None, num_workers: int) -> Iterator[Check]:
    yield machine.versions()
    yield machine.driver(os.environ)
    yield machine.memory()
    available, problem = _gpus()
    if problem is not None:
        yield problem
    yield machine.shared_memory(is_needed=len(available.gpus) > 1)
    yield from machine.gpu_memory(available)
    with started([Task("device_tasks.see", {}, devices.SECONDS)]) as (future,):
        seen, num_gpus = devices.seen(available, future.result())
    yield seen
    names = [f"GPU:{number}" for number in range(num_gpus)] or [f"CPU:{number}" for number in range(num_logical_cpus)]
    if seen.values or num_gpus:  # TensorFlow starts
        yield from _check_devices(names, source, available)
    if num_workers > 1:
        yield from workers.check_local(num_workers)


def _check_devices(names: Sequence[str], source: ModelSource | None, available: gpus.VisibleGpus) -> Iterator[Check]:
    at_once, correct = cores.num_allowed_cores(), []
    for check in devices.each(names, available, at_once):
        yield check
        correct += [check.name] * (check.status == "ok")
    yield from devices.together(correct, available)
    if source is None:
        yield Check("model", "skipped", "none is named: --config or --model runs yours on every device")
        return
    yield from models.check(source, correct, available, at_once)


def _gpus() -> tuple[gpus.VisibleGpus, Check | None]:
    try:
        available = gpus.find(os.environ)
    except ValueError as error:
        return gpus.VisibleGpus(()), Check("nvidia-smi", "WRONG", str(error))
    if available.problem:
        way_out = "Restart the machine, or have the GPUs examined: nothing can use them as they are."
        return available, Check("nvidia-smi", "WRONG", available.problem, "", way_out)
    return available, None
