"""The comparison of all layouts of some devices, from measured and stated costs. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tfpar.planning import spread
from tfpar.planning.close_layouts import Measure, with_measured
from tfpar.planning.costs import MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, Refusal, candidates, numbers_tried
from tfpar.planning.memory import device_bytes, largest_batch
from tfpar.planning.plan import Plan
from tfpar.planning.ranking import MOST_SPREAD, UNTESTED, best_of_each_grid, rank, split
from tfpar.planning.rows import PredictedStep
from tfpar.planning.step_prediction import predict


def compare(
    model: ModelCosts,
    machine: MachineCosts,
    history: str = UNTESTED,
    devices: Sequence[str] | None = None,
    measure: Measure | None = None,
    most_measured: int = 0,
) -> Plan:
    """Predict every layout of the planned devices, measure those too close to choose from, and rank them.

    With several hosts, layouts on fewer of them are rows too: one host may be faster than two.

    Args:
        model: The costs of the model.
        machine: The costs of the devices and links.
        history: How well earlier runs of this machine were predicted, in words.
        devices: Names of the devices of this host, where a user has chosen them.
        measure: Measures a layout, as `close_layouts.with_measured` takes it; None to measure none.
        most_measured: The largest number of layouts to measure.

    Returns:
        The plan.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), batch=8, compute=Curve((8,), (0.8,)), update_seconds=0.1)
        >>> compare(model, MachineCosts("GPU", num_devices=2, num_measured=2)).taken.layout.kind
        'mirrored'
    """
    steps, refusals = _predictions(model, machine)
    rows = [_with_largest_batch(step, model, machine) for step in best_of_each_grid(steps, machine)]
    if measure is not None and model.spread <= MOST_SPREAD:  # else none is taken
        rows, untrainable = with_measured(rows, machine, measure, most_measured)
        refusals += untrainable
        model = dataclasses.replace(model, spread=max(model.spread, _spread_of_measured(rows, model)))
    more, _ = _predictions(model, dataclasses.replace(machine, num_devices=machine.num_devices + 1), steps)
    return rank(rows, refusals, model, machine, more, history, devices or ())


def _spread_of_measured(steps: Sequence[PredictedStep], model: ModelCosts) -> float:
    """Return the spread of the fastest layout that was measured, with the drift since the measurement of the model.

    If the global batch was measured on one device, the prediction for it is a measurement: where the step is measured
    once more, both should be equal.
    """
    measured = [step for step in steps if step.measured_seconds is not None]
    if not measured:
        return 0.0
    again = [step for step in measured if step.layout.num_devices == 1 and model.batch in model.compute.sizes]
    drifts = [spread.between(step.seconds, step.known_seconds) for step in again]
    return max([*drifts, min(measured, key=lambda step: step.known_seconds).spread])


def may_split(model: ModelCosts, machine: MachineCosts) -> bool:
    """Return whether a pipeline with split backward passes would be the fastest layout if they cost nothing.

    Otherwise the price cannot change the choice, and measuring it would take two more pipelines.

    Args:
        model: The costs of the model.
        machine: The costs of the devices and links.
    """
    steps, _ = _predictions(dataclasses.replace(model, split_factor=1.0), machine)
    fitting, _ = split(steps, machine)
    fastest = min(fitting or steps, key=lambda step: step.seconds)
    return fastest.layout.schedule == "zero_bubble"


def _predictions(
    model: ModelCosts, machine: MachineCosts, known: Sequence[PredictedStep] = ()
) -> tuple[list[PredictedStep], list[Refusal]]:
    """Return the predicted steps of all layouts, those that are known unchanged, and the refused layouts."""
    found = {step.layout: step for step in known}
    steps: list[PredictedStep] = []
    refusals: list[Refusal] = []
    for layout in _layouts(model, machine):
        if isinstance(layout, Refusal):
            refusals.append(layout)
        else:
            steps.append(found.get(layout) or _predicted(layout, model, machine))
    return steps, refusals


def _layouts(model: ModelCosts, machine: MachineCosts) -> Iterator[Layout | Refusal]:
    divides_layers = any(block.is_divided for block in model.blocks)
    for hosts in numbers_tried(machine.num_hosts):
        for one in candidates(machine.num_devices, hosts, model.batch, len(model.blocks), divides_layers, model.mixing):
            if isinstance(one, Refusal) or one.schedule != "zero_bubble" or model.split_factor is not None:
                yield one


def _predicted(layout: Layout, model: ModelCosts, machine: MachineCosts) -> PredictedStep:
    return dataclasses.replace(
        predict(layout, model, machine),
        memory_bytes=device_bytes(layout, model, machine, model.batch),
    )


def _with_largest_batch(step: PredictedStep, model: ModelCosts, machine: MachineCosts) -> PredictedStep:
    return dataclasses.replace(step, largest_batch=largest_batch(step.layout, model, machine))
