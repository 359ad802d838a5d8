"""A user's model: the same step on every device, three steps of its strategy, and what it runs on the host."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from tfpar import config
from tfpar.checks import devices as device_checks
from tfpar.checks.check import Check
from tfpar.checks.child_processes import Outcome, Task, run_tasks, started
from tfpar.checks.model_source import ModelSource
from tfpar.cluster import gpus
from tfpar.pipeline import schedule

_SECONDS = 120.0
_BOUND, _MIXED_BOUND = 1e-3, 5e-2  # relative, of float32 and of mixed precision against float64
_LEAST_PART = 1e-2  # a gradient this much smaller than the largest one is compared with that
_ROUNDING_PART = 1e-5  # of the largest gradient
_FIRST, _EXACT, _CPU = "first", "exact", "CPU:0"
_ON_HOST, _MOST_GROUPS = "operations on the host", 5


def check(source: ModelSource, names: Sequence[str], found: gpus.Found, at_once: int) -> Iterator[Check]:
    """Yield the checks of a model.

    Args:
        source: The model.
        names: The devices that compute rightly by themselves.
        found: The GPUs of `gpus.find`.
        at_once: How many devices run at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="tfpar-doctor-") as folder:

        def step(device: str, dtype: str | None, name: str) -> Task:
            arguments = {"source": dataclasses.asdict(source), "dtype": dtype, "folder": folder, "name": name}
            return device_checks.alone("step", arguments, device, found, _SECONDS)

        (first,) = run_tasks([step(_CPU, None, _FIRST)])
        if first.result is None:
            yield failure("model", first, is_first=True)
            return
        figure = f"one step on the CPU, loss {first.result['loss']:.6g}, {first.result['num_weights']} weights"
        yield Check("model", "ok", figure, values=first.result)
        others = [name for name in names if name != _CPU]  # the first step was that of the CPU
        steps = [step(_CPU, "float64", _EXACT), *(step(name, None, name) for name in others)]
        of_strategy = _strategy_tasks(source, names, found)
        tasks = of_strategy if isinstance(of_strategy, list) else []
        if _on_gpus(names):  # a device has memory for one of them only
            with started(steps, at_once) as outcomes:
                yield from _compared(outcomes, names, folder)
            with started(tasks) as outcomes:
                yield from _of_strategy(of_strategy, outcomes)
        else:  # the longest first
            with started([*tasks, *steps], at_once) as outcomes:
                yield from _compared(outcomes[len(tasks) :], names, folder)
                yield from _of_strategy(of_strategy, outcomes[: len(tasks)])


def _on_gpus(names: Sequence[str]) -> bool:
    return bool(names) and names[0].startswith("GPU")


def _compared(outcomes: Sequence[Future[Outcome]], names: Sequence[str], folder: str) -> Iterator[Check]:
    """Yield for each device whether its step equals that of the CPU, from the ends of the exact step and of theirs."""
    exact, *others = outcomes
    reference, what = _reference(Path(folder), exact.result())
    left = iter(others)
    for name in names:
        outcome = None if name == _CPU else next(left).result()
        if outcome is not None and outcome.result is None:
            yield failure(f"model on {name}", outcome)
        else:
            yield compared(name, _read(folder, _FIRST if name == _CPU else name), reference, what)


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


def _strategy_tasks(source: ModelSource, names: Sequence[str], found: gpus.Found) -> list[Task] | Check:
    """Return the tasks of the strategy: three steps, and the placement of one; a check if it lacks devices."""
    settings = source.run().strategy
    number = num_devices(settings, len(names), on_gpus=_on_gpus(names))
    variables: dict[str, str] = {}
    if not _on_gpus(names):
        # The first logical CPU is the host, and the others stand for GPUs.
        chosen, num_cpus = [f"CPU:{index + 1}" for index in range(number)], number + 1
    else:
        across = isinstance(settings, config.Pipeline) and settings.across_workers
        if across and len(names) < number:
            return Check("strategy", "skipped", f"its {number} devices are those of several machines")
        wanted = (not across and named_devices(settings)) or list(names)[:number]
        missing = [name for name in wanted if name not in names]
        if missing or len(wanted) < number:
            way_out = "Repair the devices above, or change strategy.devices."
            figure = f"{', '.join(missing) or number - len(wanted)} of its devices cannot be used"
            return Check("strategy", "WRONG", figure, f"{number} device(s)", way_out)
        variables, inside = device_checks.together(wanted, found)
        chosen, num_cpus = list(inside.values()), 1
    arguments = {"source": dataclasses.asdict(source), "devices": chosen}
    return [Task(name, arguments, _SECONDS, variables, num_cpus) for name in ("compare", "place")]


def _of_strategy(tasks: list[Task] | Check, outcomes: Sequence[Future[Outcome]]) -> Iterator[Check]:
    """Yield the checks of the strategy from the ends of its tasks."""
    if isinstance(tasks, Check):
        yield tasks
        return
    judges = {"strategy": judged_strategy, _ON_HOST: judged_placement}
    for (name, judged), future in zip(judges.items(), outcomes, strict=True):
        outcome = future.result()
        yield failure(name, outcome) if outcome.result is None else judged(outcome.result)


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
    if isinstance(settings, config.TensorParallel):
        return settings.num_shards * settings.num_replicas
    named = len(named_devices(settings))
    if isinstance(settings, config.Pipeline):
        num_replicas = settings.num_replicas if isinstance(settings, config.Hybrid) else 1
        per_replica = named // (num_replicas * settings.num_shards) or None
        chosen = schedule.make(settings.schedule, settings.num_stages, settings.num_microbatches, per_replica)
        return num_replicas * settings.num_shards * chosen.num_devices
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
    differences = {**result["weights"], **{f"the {name}": value for name, value in result["logs"].items()}}
    bound = f"{result['bound']:g} in {result['precision']}"
    if not result["finite"]:
        return Check("strategy", "WRONG", f"{result['strategy']}: the loss of three steps is not finite", values=result)
    first = next((name for name, value in differences.items() if not value <= result["bound"]), None)
    conditions = f", {result['conditions']}" if result["conditions"] else ""
    if first is None:
        worst = max(differences.values(), default=0.0)
        figure = f"{result['strategy']}: three steps differ by {worst:.1e} from one device{conditions}"
        return Check("strategy", "ok", figure, bound, values=result)
    figure = f"{result['strategy']}: {first} differs by {differences[first]:.1e} from one device after three steps"
    way_out = "tfpar.check_parity compares each weight; look at the copies and the all-reduce above."
    return Check("strategy", "WRONG", f"{figure}{conditions}", bound, way_out, result)


def judged_placement(result: dict[str, Any]) -> Check:
    """Return which operations of a step have no kernel for GPUs, and which lines of the user's code create them.

    Args:
        result: That of the task `place`.
    """
    number, waits = result["num_operations"], result["num_waits"]
    if not result["on_host"]:
        figure = (
            f"none of {number:,} operations runs on the host between two of a GPU; the host waits for {waits} values"
        )
        return Check(_ON_HOST, "ok", figure, values=result)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for one in result["on_host"]:
        groups[one.get("file", ""), one.get("function") or one["layer"]].append(one)
    listed = "; ".join(itertools.starmap(_group, itertools.islice(groups.items(), _MOST_GROUPS)))
    more = f"; {len(groups) - _MOST_GROUPS} more places" if len(groups) > _MOST_GROUPS else ""
    figure = f"{listed}{more} ({number:,} operations in a step)"
    way_out = "They have no kernel for GPUs: each copies its inputs to the host and its results back. Replace them."
    return Check(_ON_HOST, "slow", figure, "0 between two of a GPU", way_out, result)


def _group(place: tuple[str, str], operations: Sequence[dict[str, Any]]) -> str:
    """Return a clause about the operations of one function, or of one layer."""
    file, name = place
    lines = ", ".join(map(str, sorted({one["line"] for one in operations if file})))
    where = f" ({Path(file).name}:{lines})" if file else ""
    kinds = ", ".join(dict.fromkeys(one["kind"] for one in operations))
    some = f"{len(operations)} operations" if len(operations) > 1 else "1 operation"
    return f"{some} of `{name or 'the step'}`{where} run{'s' * (len(operations) == 1)} on the host: {kinds}"
