"""The layouts too close to choose from by prediction alone, which are measured. Pure Python, no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfpar.planning.costs import MachineCosts
from tfpar.planning.layouts import Refusal
from tfpar.planning.ranking import split
from tfpar.planning.rows import PredictedStep

# Of a prediction: nine tenths of those in the planner's benchmark are closer than twice the goal of 15 %.
MARGIN = 0.3

Measure = Callable[[PredictedStep], "PredictedStep | Refusal | None"]


def with_measured(
    steps: Sequence[PredictedStep], machine: MachineCosts, measure: Measure, most: int
) -> tuple[list[PredictedStep], list[Refusal]]:
    """Measure the layouts that may be the fastest, the most promising first.

    The layout of the shortest prediction is measured first, then one of each other kind, then the others: predictions
    of one kind, such as replicas, err in the same direction. One whose prediction is longer than the shortest one, and
    than the shortest known step, by more than `MARGIN` is not measured. Nothing is measured where one prediction leads
    by more than that.

    Other processes make a step longer, and never shorter: where another layout wins, that of the shortest prediction is
    measured once more, and its shorter step counts.

    Args:
        steps: The predicted steps of the rows of a plan.
        machine: The devices: only layouts that fit, on as many devices as there are, are measured.
        measure: Returns a step with its measured seconds; why its layout cannot train; None to measure no more.
        most: The largest number of layouts to measure.

    Returns:
        The steps, and the refusals of layouts that cannot train.

    Example:
        >>> import dataclasses
        >>> from tfpar.planning.layouts import Layout
        >>> steps = [PredictedStep(Layout(), 1.0, {}), PredictedStep(Layout(2), 0.9, {})]
        >>> def twice(step):
        ...     return dataclasses.replace(step, measured_seconds=2 * step.seconds)
        >>> [step.known_seconds for step in with_measured(steps, MachineCosts("CPU", 2, 2), twice, most=3)[0]]
        [2.0, 1.8]
    """
    found, refusals, tried = list(steps), list[Refusal](), list[str]()
    for _ in range(most):
        rivals = _rivals(found, machine)
        if not rivals:
            break
        step = min(rivals, key=lambda one: (tried.count(one.layout.kind), one.seconds))
        tried.append(step.layout.kind)
        result = measure(step)
        if result is None:
            break
        if isinstance(result, Refusal):
            found.remove(step)
            refusals.append(result)
        else:
            found[found.index(step)] = result
    if (first := _surprising(found)) is not None:
        again = measure(first)
        if isinstance(again, PredictedStep) and again.measured_seconds is not None:
            found[found.index(first)] = min(first, again, key=lambda step: step.known_seconds)
    return found, refusals


def _surprising(steps: Sequence[PredictedStep]) -> PredictedStep | None:
    """Return the measured layout of the shortest prediction if another one was measured to be faster."""
    measured = [step for step in steps if step.measured_seconds is not None and not step.ran_out_of_memory]
    first = min(measured, key=lambda step: step.seconds, default=None)
    return None if first is None or first is min(measured, key=lambda step: step.known_seconds) else first


def _rivals(steps: Sequence[PredictedStep], machine: MachineCosts) -> list[PredictedStep]:
    """Return the layouts to measure: those that may be the fastest, if more than one may."""
    fitting, _ = split(steps, machine)
    if not fitting:
        return []
    # Predictions of one model err in the same direction, so that they are compared with each other too.
    most_predicted = min(step.seconds for step in fitting) * (1 + MARGIN)
    most = min(step.known_seconds for step in fitting) * (1 + MARGIN)
    close = [step for step in fitting if step.seconds <= most_predicted or step.known_seconds <= most]
    if len(close) == 1 and not any(step.measured_seconds for step in steps):
        return []
    return [step for step in close if step.measured_seconds is None and _is_there(step, machine)]


def _is_there(step: PredictedStep, machine: MachineCosts) -> bool:
    return step.layout.num_hosts == 1 and step.layout.num_devices <= machine.num_measured
