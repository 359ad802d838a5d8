"""A user's model: the same step on every device, what has no kernel for GPUs, and three steps of its strategy."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpar import config
from tfpar.checks.devices import on_device
from tfpar.checks.processes import Outcome, Task, started
from tfpar.checks.report import Check
from tfpar.cluster import gpus
from tfpar.messages.received import quoted

_SECONDS = 120.0
_BOUND, _MIXED_BOUND = 1e-3, 5e-2  # relative, of float32 and of mixed precision against float64
_LEAST_PART = 1e-2  # a gradient this much smaller than the largest one is compared with that
_CPU = "CPU:0"
_MOST_GROUPS = 5


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model with its data and its strategy, as a user has named them.

    Attributes:
        configuration: A configuration file; None for a model function.
        overrides: Settings `key=value` of the configuration; with a model function, those of its strategy.
        function: The model function, as "file.py:function" or "package.module:function".
        data: A function without arguments that returns a dataset, in the same form; empty to make up a batch.
        batch: The arrays of a batch; None without one.
    """

    configuration: str | None = None
    overrides: tuple[str, ...] = ()
    function: str = ""
    data: str = ""
    batch: Any = None

    def run(self) -> config.Run:
        """Return the run of the configuration; with a model function, only its strategy counts.

        Raises:
            ValueError: If a setting is wrong, or has no effect on the model function.
        """
        for setting in self.overrides:
            if self.function and not setting.startswith("strategy."):
                raise ValueError(
                    f"With a model function only settings of strategy can be changed, received {quoted(setting)}. "
                    "Leave it out, or name a configuration instead."
                )
        return config.load(self.configuration, self.overrides)


def check(source: ModelSource, devices: Sequence[str], available: gpus.Found, at_once: int) -> Iterator[Check]:
    """Yield the checks of a model on each device."""

    def step(device: str, dtype: str | None, start: Any) -> Task:
        arguments = {"source": source, "dtype": dtype, "start": start}
        return on_device("model_tasks.step", device, available, _SECONDS, **arguments)

    with started([step(_CPU, None, None)]) as (future,):
        first = future.result()
    if first.result is None:
        yield failed("model", first, is_first=True)
        return
    values = {
        "loss": first.result["loss"],
        "policy": first.result["policy"],
        "num_weights": first.result["num_weights"],
    }
    figure = f"one step on the CPU, loss {values['loss']:.6g}, {values['num_weights']} weights"
    yield Check("model", "ok", figure, values=values)
    yield without_kernels(first.result["num_operations"], first.result["without_kernel"])
    start = first.result["start"]
    others = [name for name in devices if name != _CPU]  # the first step was that of the CPU
    tasks = [step(_CPU, "float64", start), *(step(name, None, start) for name in others)]
    with started(tasks, at_once) as (exact, *futures):
        steps = dict(zip(others, futures, strict=True))
        reference, what = _reference(first.result, exact.result())
        for name in devices:
            outcome = steps[name].result() if name in steps else first
            if outcome.result is None:
                yield failed(f"model on {name}", outcome)
            else:
                yield compared(name, outcome.result, reference, what)


def failed(name: str, outcome: Outcome, *, is_first: bool = False) -> Check:
    """Return the check of a task that did not end well."""
    if outcome.place and is_first:
        way_out = f"Correct {outcome.place}: neither the machine nor tfpar is the cause."
        figure = f"your code raises {outcome.problem}"
        return Check(name, "WRONG", figure, "", way_out, {"place": outcome.place})
    at = f" at {outcome.stage}" if outcome.stage and "hung" in outcome.problem else ""
    where = f" (at {outcome.place}, which runs on the CPU)" if outcome.place else ""
    return Check(name, "WRONG", f"{outcome.problem}{at}{where}", f"{_SECONDS:g} s" if at else "")


def _reference(first: Any, exact: Outcome) -> tuple[Any, str]:
    """Return the step in float64; that of the CPU in the model's own type if the two differ, as random draws do."""
    if exact.result is not None and _worst(first, exact.result)[0] <= bound_of(first["policy"]):
        return exact.result, "the CPU in float64"
    return first, f"the CPU in {first['policy']}"


def compared(name: str, actual: Any, reference: Any, what: str) -> Check:
    """Return whether the loss and the gradients of a device equal those of the reference, described by `what`."""
    bound = bound_of(actual["policy"])
    worst, where = _worst(actual, reference)
    values = {"difference": worst, "first": "" if worst <= bound else where}
    if worst <= bound:
        figure = f"loss and gradients differ by {worst:.1e} from {what}"
        return Check(f"model on {name}", "ok", figure, f"{bound:g}", values=values)
    figure = f"{where} differs by {worst:.1e} from {what}"
    way_out = f"{name} computes this model wrongly. Leave it out of the devices, and have it examined."
    return Check(f"model on {name}", "WRONG", figure, f"{bound:g}", way_out, values)


def bound_of(policy: str) -> float:
    """Return the relative difference up to which a step of a dtype policy counts as right."""
    return _MIXED_BOUND if "16" in policy else _BOUND


def _worst(actual: Any, reference: Any) -> tuple[float, str]:
    """Return the first relative difference beyond the bound, or else the largest one, and where it is."""
    norms = [float(np.linalg.norm(gradient)) for gradient in reference["gradients"].values()]
    least = _LEAST_PART * max(norms, default=0.0)
    differences = [(_relative(actual["loss"], reference["loss"], 0.0), "the loss")]
    differences += [
        (_relative(actual["gradients"][path], gradient, least), f"the gradient of {path}")
        for path, gradient in reference["gradients"].items()
    ]
    bound = bound_of(actual["policy"])
    return next((row for row in differences if not row[0] <= bound), max(differences))


def _relative(actual: Any, expected: Any, least: float) -> float:
    difference = np.linalg.norm(np.asarray(actual, "float64") - np.asarray(expected, "float64"))
    scale = max(float(np.linalg.norm(np.asarray(expected, "float64"))), least)
    return float(difference / scale) if scale else float(difference)


def without_kernels(num_operations: int, operations: Sequence[Mapping[str, Any]]) -> Check:
    """Return which operations of a step have no kernel for GPUs, and which lines of the user's code create them."""
    name = "operations on the host"
    values = {"num_operations": num_operations, "on_host": operations}
    if not operations:
        return Check(name, "ok", f"all {num_operations:,} operations of a step have kernels for GPUs", values=values)
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = collections.defaultdict(list)
    for operation in operations:
        groups[operation["file"], operation["function"]].append(operation)
    listed = "; ".join(itertools.starmap(_group, itertools.islice(groups.items(), _MOST_GROUPS)))
    more = f"; {len(groups) - _MOST_GROUPS} more places" if len(groups) > _MOST_GROUPS else ""
    figure = f"{listed}{more} ({num_operations:,} operations in a step)"
    way_out = "They have no kernel for GPUs: each copies its inputs to the host and its results back. Replace them."
    return Check(name, "slow", figure, "0", way_out, values)


def _group(place: tuple[str, str], operations: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause about the operations of one function, or of one layer."""
    file, name = place
    lines = ", ".join(map(str, sorted({operation["line"] for operation in operations if file})))
    where = f" ({Path(file).name}:{lines})" if file else ""
    kinds = ", ".join(dict.fromkeys(operation["kind"] for operation in operations))
    some = f"{len(operations)} operations" if len(operations) > 1 else "1 operation"
    return f"{some} of `{name or 'the step'}`{where} run{'s' * (len(operations) == 1)} on the host: {kinds}"


def check_strategy(source: ModelSource, devices: Sequence[str], right: Sequence[str]) -> Check:
    """Return whether three steps of the strategy of a model give the weights of one device."""
    settings = source.run().strategy
    if [*devices] != [*right]:
        return Check("strategy", "skipped", "it needs devices that compute rightly: see above")
    on_gpus, needed = devices[0].startswith("GPU"), _num_devices(settings)
    if on_gpus and getattr(settings, "across_workers", False) and needed > len(devices):
        return Check("strategy", "skipped", f"its {needed} devices are those of several machines")
    arguments = {"source": source, "settings": settings_on(settings, devices)}
    with started([Task("model_tasks.compare", arguments, _SECONDS)]) as (future,):
        outcome = future.result()
    check: Check | None = outcome.result
    return failed("strategy", outcome) if check is None else check


def settings_on(settings: config.Strategy, devices: Sequence[str]) -> config.Strategy:
    """Return the settings of a strategy on this machine, whose devices stand for those of other workers."""
    across = getattr(settings, "across_workers", False)
    changes: dict[str, Any] = {"across_workers": False, "devices": None} if across else {}
    if devices[0].startswith("GPU"):
        return settings.model_copy(update=changes)
    if isinstance(settings, config.SingleDevice):
        return settings.model_copy(update={"device": None})
    takes_all = isinstance(settings, config.Mirrored | config.MultiWorker)
    number = _num_devices(settings) if settings.devices or not takes_all else len(devices)
    changes |= {"devices": None, "num_logical_cpus": max(number, settings.num_logical_cpus)}
    return settings.model_copy(update=changes)


def _num_devices(settings: config.Strategy) -> int:
    """Return how many devices a grid needs, or the settings name."""
    of_grid: int = math.prod(getattr(settings, name, 1) for name in ("num_stages", "num_shards", "num_replicas"))
    return max(of_grid, len(getattr(settings, "devices", None) or ()))
