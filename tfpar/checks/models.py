"""A user's model: the same step on every device, three steps of its strategy, and what it runs on the host."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpar import config
from tfpar.checks import devices as device_checks
from tfpar.checks.check import Check
from tfpar.checks.child_processes import Outcome, Task, run_tasks
from tfpar.checks.model_source import ModelSource
from tfpar.cluster import gpus
from tfpar.pipeline import schedule

_SECONDS = 120.0
_BOUND, _MIXED_BOUND = 1e-3, 5e-2  # relative, of float32 and of mixed precision against float64
_PARITY_BOUND = 1e-9  # of three steps in float64
_LEAST_PART = 1e-2  # a gradient this much smaller than the largest one is compared with that
_ROUNDING_PART = 1e-5  # of the largest gradient
_FIRST, _EXACT = "first", "exact"


def check(source: ModelSource, names: Sequence[str], found: gpus.Found, at_once: int) -> Iterator[Check]:
    """Yield the checks of a model.

    Args:
        source: The model.
        names: The devices that compute rightly by themselves.
        found: The GPUs of `gpus.find`.
        at_once: How many devices run at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="tfpar-doctor-") as folder:
        steps = _steps(source, names, found, at_once, folder)
        first = next(steps)
        yield first
        if first.status == "WRONG":
            return
        yield from steps
    yield from _with_strategy(source, names, found)


def _steps(source: ModelSource, names: Sequence[str], found: gpus.Found, at_once: int, folder: str) -> Iterator[Check]:
    """Yield whether the model runs on the CPU, and for each device whether its step equals that of the CPU."""
    fields = dataclasses.asdict(source)

    def task(device: str, dtype: str | None, name: str) -> Task:
        arguments = {"source": fields, "dtype": dtype, "folder": folder, "name": name}
        return device_checks.alone("step", arguments, device, found, _SECONDS)

    (first,) = run_tasks([task("CPU:0", None, _FIRST)])
    if first.result is None:
        yield failure("model", first, is_first=True)
        return
    figure = f"one step on the CPU, loss {first.result['loss']:.6g}, {first.result['num_weights']} weights"
    yield Check("model", "ok", figure, values=first.result)
    tasks = [task("CPU:0", "float64", _EXACT), *(task(name, None, name) for name in names)]
    exact, *outcomes = run_tasks(tasks, at_once)
    reference, what = _reference(Path(folder), exact)
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome.result is None:
            yield failure(f"model on {name}", outcome)
        else:
            yield compared(name, _read(folder, name), reference, what)


def failure(name: str, outcome: Outcome, *, is_first: bool = False) -> Check:
    """Return the check of a task that did not end well.

    Args:
        name: Of the check.
        outcome: The end of its task.
        is_first: Whether it is the first run of the model, on the CPU: then an error in the user's own code is the
            user's. Code that has run there can fail elsewhere because of the device.
    """
    at = f" at {outcome.stage}" if outcome.stage and "hung" in outcome.problem else ""
    if outcome.place and is_first:
        return Check(
            name,
            "WRONG",
            f"your code raises {outcome.problem}",
            "",
            f"Correct {outcome.place}: neither the machine nor tfpar is the cause.",
            {"place": outcome.place},
        )
    where = f" (at {outcome.place}, which runs on the CPU)" if outcome.place else ""
    return Check(name, "WRONG", f"{outcome.problem}{at}{where}", f"{_SECONDS:g} s" if at else "")


def _reference(folder: Path, exact: Outcome) -> tuple[Any, str]:
    """Return the step in float64; that of the CPU in the model's own type if the two differ, as random draws do."""
    first = _read(str(folder), _FIRST)
    if exact.result is not None:
        found = _read(str(folder), _EXACT)
        if _worst(first, found)[0] <= bound_of(first["policy"]):
            return found, "the CPU in float64"
    return first, f"the CPU in {first['policy']}"


def compared(name: str, actual: Any, reference: Any, what: str) -> Check:
    """Return whether a step of a device equals that of the reference.

    Args:
        name: Of the device.
        actual: Its loss, gradients and weights.
        reference: Those of the reference.
        what: The reference, in words.
    """
    bound = bound_of(actual["policy"])
    worst, where = _worst(actual, reference)
    if worst <= bound:
        figure = f"loss, gradients and weights differ by {worst:.1e} from {what}"
        return Check(f"model on {name}", "ok", figure, f"{bound:g}", values={"difference": worst})
    figure = f"{where} differs by {worst:.1e} from {what}"
    way_out = f"{name} computes this model wrongly. Leave it out of the devices, and have it examined."
    values = {"difference": worst, "first": where}
    return Check(f"model on {name}", "WRONG", figure, f"{bound:g}", way_out, values)


def bound_of(policy: str) -> float:
    """Return the relative difference up to which a step of a dtype policy counts as right."""
    return _MIXED_BOUND if "16" in policy else _BOUND


def _worst(actual: Any, reference: Any) -> tuple[float, str]:
    """Return the first relative difference beyond the bound, or else the largest one, and where it is."""
    found = [(_relative(actual["loss"], reference["loss"], 0.0), "the loss")]
    norms = [np.linalg.norm(one) for one in reference["gradients"] if one is not None]
    least = _LEAST_PART * float(max(norms, default=0.0))
    largest = max((float(np.abs(one).max(initial=0.0)) for one in reference["gradients"] if one is not None), default=0)
    rows = zip(reference["paths"], actual["gradients"], reference["gradients"], strict=True)
    found += [(_relative(one, other, least), f"the gradient of {path}") for path, one, other in rows if one is not None]
    for path, weight, other, gradient in zip(
        reference["paths"], actual["weights"], reference["weights"], reference["gradients"], strict=True
    ):
        counts = _counts(gradient, other, largest)
        found.append((_relative(weight[counts], other[counts], 0.0), f"the updated {path}"))
    bound = bound_of(actual["policy"])
    return next((one for one in found if not one[0] <= bound), max(found))


def _counts(gradient: Any, weight: Any, largest: float) -> Any:
    """Return where an updated weight is compared: where its gradient is only rounding, Adam's update is its sign."""
    if gradient is None or not gradient.size:
        return np.ones(weight.shape, bool)
    return np.abs(gradient) >= max(_LEAST_PART * np.abs(gradient).max(), _ROUNDING_PART * largest)


def _relative(actual: Any, expected: Any, least: float) -> float:
    difference = np.linalg.norm(np.asarray(actual, "float64") - np.asarray(expected, "float64"))
    scale = max(float(np.linalg.norm(np.asarray(expected, "float64"))), least)
    return float(difference / scale) if scale else float(difference)


def _read(folder: str, name: str) -> Any:
    return pickle.loads((Path(folder) / name).read_bytes())


def _with_strategy(source: ModelSource, names: Sequence[str], found: gpus.Found) -> Iterator[Check]:
    settings = source.run().strategy
    on_gpus = bool(names) and names[0].startswith("GPU")
    number = num_devices(settings, len(names), on_gpus=on_gpus)
    variables: dict[str, str] = {}
    if not on_gpus:
        # The first logical CPU is the host, and the others stand for GPUs.
        chosen, num_cpus = [f"CPU:{index + 1}" for index in range(number)], number + 1
    else:
        wanted = named_devices(settings) or list(names)[:number]
        missing = [name for name in wanted if name not in names]
        if missing or len(wanted) < number:
            way_out = "Repair the devices above, or change strategy.devices."
            figure = f"{', '.join(missing) or number - len(wanted)} of its devices cannot be used"
            yield Check("strategy", "WRONG", figure, f"{number} device(s)", way_out)
            return
        variables, inside = device_checks.together(wanted, found)
        chosen, num_cpus = list(inside.values()), 1
    arguments = {"source": dataclasses.asdict(source), "devices": chosen}
    (outcome,) = run_tasks([Task("compare", arguments, _SECONDS, variables, num_cpus)])
    if outcome.result is None:
        yield failure("strategy", outcome)
    else:
        yield judged_strategy(outcome.result)
        yield judged_placement(outcome.result)


def named_devices(settings: config.Strategy) -> list[str]:
    """Return the devices that the settings of a strategy name."""
    if isinstance(settings, config.SingleDevice):
        return [settings.device] if settings.device else []
    return list(settings.devices or ())


def num_devices(settings: config.Strategy, existing: int, *, on_gpus: bool) -> int:
    """Return how many devices a strategy trains on.

    Args:
        settings: Its settings.
        existing: The devices of this machine that can be used.
        on_gpus: Whether they are GPUs.
    """
    if isinstance(settings, config.SingleDevice):
        return 1
    named = len(named_devices(settings))
    if isinstance(settings, config.Pipeline):
        chosen = schedule.make(settings.schedule, settings.num_stages, settings.num_microbatches, named or None)
        return chosen.num_devices
    if named:
        return named
    if isinstance(settings, config.Auto):
        return existing if on_gpus else 1
    return existing if on_gpus or settings.num_logical_cpus == 1 else settings.num_logical_cpus


def judged_strategy(result: dict[str, Any]) -> Check:
    """Return whether three steps of a strategy gave the weights of one device.

    Args:
        result: That of the task `compare`.
    """
    worst = max([result["loss"], *result["weights"].values()])
    first = next((path for path, one in result["weights"].items() if not one <= _PARITY_BOUND), "the loss")
    bound = f"{_PARITY_BOUND:g} in float64"
    if not result["finite"]:
        return Check("strategy", "WRONG", f"{result['strategy']}: the loss of three steps is not finite", values=result)
    if worst <= _PARITY_BOUND:
        figure = f"{result['strategy']}: three steps differ by {worst:.1e} from one device"
        return Check("strategy", "ok", figure, bound, values=result)
    figure = f"{result['strategy']}: {first} differs by {worst:.1e} from one device after three steps"
    if result["by_design"]:
        layers = ", ".join(result["by_design"][:3])
        reason = f"{figure}, as it must: {layers} draw or normalize per part of a batch"
        return Check("strategy", "skipped", reason, bound, values=result)
    way_out = "tfpar.check_parity compares each weight; look at the copies and the all-reduce above."
    return Check("strategy", "WRONG", figure, bound, way_out, result)


def judged_placement(result: dict[str, Any]) -> Check:
    """Return which operations of a step have no kernel for GPUs.

    Args:
        result: That of the task `compare`.
    """
    number, waits = result["num_operations"], result["num_waits"]
    if not result["on_host"]:
        figure = (
            f"none of {number:,} operations runs on the host between two of a GPU; the host waits for {waits} values"
        )
        return Check("operations on the host", "ok", figure, values=result)
    counts = collections.Counter(f"{kind} in {layer or 'the step'}" for kind, layer in result["on_host"])
    listed = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.most_common(5))
    figure = f"{len(result['on_host'])} of {number:,} operations have no GPU kernel: {listed}"
    way_out = "Each of them copies its inputs to the host and its results back: replace it by others."
    return Check("operations on the host", "slow", figure, "0 between two of a GPU", way_out, result)
