"""The experiment `plan`: how well the planner predicts the step of each layout, and how good its choice is.

    python -m benchmarks plan

Every layout that two logical CPUs can run is predicted from the measurement of one device, and then trained. The regret
is the measured step of the planner's choice, relative to the fastest that was measured: of a plan that measures layouts
too close to choose from, and of prediction alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Round


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is planned and trained.

    Args:
        model: A model of the experiment.
        batch: Examples of the global batch.
    """

    model: str
    batch: int


_SETTINGS = {
    name: Planned(name, batch)
    for name, batch in (
        ("wide MLP", 256),
        ("CNN", 64),
        ("transformer", 32),
        ("tied embeddings", 32),
        ("one dominant layer", 256),
        ("many tiny layers", 256),
    )
}
MOST_REGRET, MEDIAN_ERROR, NINTH_DECILE = 1.05, 0.08, 0.15


def measure(setting: Planned) -> Output:
    """Return the predicted and measured steps of all layouts of a model, and the regret.

    Args:
        setting: The model.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.plan_worker", vars(setting))


def ratios(outputs: Round, measured: str = "measured") -> Iterator[float]:
    """Yield predicted relative to measured figures, for each prediction of a round.

    Args:
        outputs: The outputs of each setting.
        measured: The first word of the names of the measured figures.

    Example:
        >>> list(ratios({"model": {"predicted SingleDevice": 120, "tensors SingleDevice": 100}}, "tensors"))
        [1.2]
    """
    for output in outputs.values():
        for name, predicted in output.items():
            if name.startswith("predicted "):
                yield predicted / output[name.replace("predicted", measured, 1)]


def errors(outputs: Round) -> Iterator[float]:
    """Yield the relative error of each prediction of a round: 0.1 for one that is 10 % too large or too small.

    Args:
        outputs: The outputs of each setting.

    Example:
        >>> list(errors({"model": {"predicted SingleDevice": 0.75, "measured SingleDevice": 1.0, "regret": 1.0}}))
        [0.25]
    """
    return (abs(ratio - 1) for ratio in ratios(outputs))


def errors_at_equal_speed(outputs: Round) -> Iterator[float]:
    """Yield the errors as if the machine had been as fast in training as in planning, but for that of one device.

    The step of one device is measured in planning, and around each layout. It tells how fast the machine was.

    Args:
        outputs: The outputs of each setting.

    Example:
        >>> slower = {"predicted SingleDevice": 1.0, "predicted Mirrored(2)": 0.5}
        >>> slower |= {"measured Mirrored(2)": 0.6, "one device Mirrored(2)": 1.2}
        >>> list(errors_at_equal_speed({"model": slower}))
        [0.0]
    """
    for output in outputs.values():
        of_one = output["predicted SingleDevice"]
        for name, predicted in output.items():
            kind, _, layout = name.partition(" ")
            if kind == "predicted" and layout != "SingleDevice":
                drift = output[f"one device {layout}"] / of_one
                yield abs(predicted * drift / output[f"measured {layout}"] - 1)


def _decile(values: Iterator[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def _regrets(name: str) -> tuple[Finding, Finding]:
    """Return the regret of the plan, and that of a plan whose close layouts were not measured."""
    plan, predicted = "regret", "regret of prediction alone"
    return (
        Finding(f"{plan}, {name}", lambda outputs: outputs[name][plan], at_most=MOST_REGRET),
        Finding(f"{predicted}, {name}", lambda outputs: outputs[name][predicted], at_most=MOST_REGRET),
    )


PLAN = Experiment(
    name="plan",
    summary="Six models: predicted and measured step of every layout of two logical CPUs, and the planner's choice",
    figure="regret",
    settings=_SETTINGS,
    measure=measure,
    findings=(
        Finding(
            "error of the predicted step, median",
            lambda outputs: statistics.median(errors(outputs)),
            at_most=MEDIAN_ERROR,
        ),
        Finding(
            "error of the predicted step, 90th percentile",
            lambda outputs: _decile(errors(outputs)),
            at_most=NINTH_DECILE,
        ),
        Finding(
            "at equal speed of the machine, median",
            lambda outputs: statistics.median(errors_at_equal_speed(outputs)),
            at_most=MEDIAN_ERROR,
        ),
        Finding(
            "at equal speed of the machine, 90th percentile",
            lambda outputs: _decile(errors_at_equal_speed(outputs)),
            at_most=NINTH_DECILE,
        ),
        *itertools.chain.from_iterable(map(_regrets, _SETTINGS)),
    ),
)
