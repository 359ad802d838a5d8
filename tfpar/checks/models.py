"""Check of a user's model: the same step on every device, compared with the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfpar import config
from tfpar.checks.devices import on_device
from tfpar.checks.processes import Outcome, Task, started
from tfpar.checks.report import Check
from tfpar.cluster.gpu import gpus
from tfpar.messages.received import quoted

_SECONDS = 120.0
_BOUND, _MIXED_BOUND = 1e-3, 5e-2  # relative differences of float32 and mixed precision from float64
_LEAST_NORM = 1e-2  # smaller gradients, relative to the largest, are compared on this scale
_CPU = "CPU:0"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model and its data, as named by the user.

    Attributes:
        configuration: A configuration file; None for a model function.
        overrides: Settings of the configuration, such as `"training.epochs=3"`.
        function: The model function, as "file.py:function" or "package.module:function".
        data: A function that returns a dataset, named in the same form; empty to make up a batch.
        batch: The arrays of a batch; takes precedence over a made-up one.
    """

    configuration: str | None = None
    overrides: tuple[str, ...] = ()
    function: str = ""
    data: str = ""
    batch: Any = None

    def run(self) -> config.Run:
        """Return the run of the configuration.

        Raises:
            ValueError: If a setting is invalid, or given for a model function.
        """
        if self.function and self.overrides:
            raise ValueError(
                f"A model function has no settings, received {quoted(self.overrides[0])}. Leave it out, or name a "
                "configuration instead."
            )
        return config.load(self.configuration, self.overrides)


def check(source: ModelSource, devices: Sequence[str], available: gpus.VisibleGpus, at_once: int) -> Iterator[Check]:
    """Check the model on each device."""

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
    trains, findings = first.result["study"]
    figure = findings if trains else f"Mirrored and MultiWorker refuse it. {findings}"
    yield Check("parts of a batch", "ok" if trains else "skipped", figure, values={"trains": trains})
    start = first.result["start"]
    others = [name for name in devices if name != _CPU]  # the first step ran on the CPU
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
    """Return the check of a task that failed."""
    if outcome.place and is_first:
        way_out = f"Correct {outcome.place}: neither the machine nor tfpar is the cause."
        figure = f"your code raises {outcome.problem}"
        return Check(name, "WRONG", figure, "", way_out, {"place": outcome.place})
    at = f" at {outcome.stage}" if outcome.stage and "hung" in outcome.problem else ""
    where = f" (at {outcome.place}, which runs on the CPU)" if outcome.place else ""
    return Check(name, "WRONG", f"{outcome.problem}{at}{where}", f"{_SECONDS:g} s" if at else "")


def _reference(first: Any, exact: Outcome) -> tuple[Any, str]:
    """Return the step to compare with: in float64, unless random numbers differ there, then in the model's own type."""
    if exact.result is not None and _worst(first, exact.result)[0] <= tolerance(first["policy"]):
        return exact.result, "the CPU in float64"
    return first, f"the CPU in {first['policy']}"


def compared(name: str, actual: Any, reference: Any, what: str) -> Check:
    """Compare the loss and the gradients of a device with the reference, which `what` describes."""
    bound = tolerance(actual["policy"])
    worst, where = _worst(actual, reference)
    values = {"difference": worst, "first": "" if worst <= bound else where}
    if worst <= bound:
        figure = f"loss and gradients differ by {worst:.1e} from {what}"
        return Check(f"model on {name}", "ok", figure, f"{bound:g}", values=values)
    figure = f"{where} differs by {worst:.1e} from {what}"
    way_out = f"{name} computes this model wrongly. Leave it out of the devices, and have it examined."
    return Check(f"model on {name}", "WRONG", figure, f"{bound:g}", way_out, values)


def tolerance(policy: str) -> float:
    """Return the largest relative difference allowed for a dtype policy."""
    return _MIXED_BOUND if "16" in policy else _BOUND


def _worst(actual: Any, reference: Any) -> tuple[float, str]:
    """Return the first relative difference above the tolerance, or the largest one, and its place."""
    norms = [float(np.linalg.norm(gradient)) for gradient in reference["gradients"].values()]
    least = _LEAST_NORM * max(norms, default=0.0)
    differences = [(_relative(actual["loss"], reference["loss"], 0.0), "the loss")]
    differences += [
        (_relative(actual["gradients"][path], gradient, least), f"the gradient of {path}")
        for path, gradient in reference["gradients"].items()
    ]
    bound = tolerance(actual["policy"])
    return next((row for row in differences if not row[0] <= bound), max(differences))


def _relative(actual: Any, expected: Any, least: float) -> float:
    difference = np.linalg.norm(np.asarray(actual, "float64") - np.asarray(expected, "float64"))
    scale = max(float(np.linalg.norm(np.asarray(expected, "float64"))), least)
    return float(difference / scale) if scale else float(difference)
