"""The harness of every experiment: settings take turns, figures are compared within a round. No TensorFlow here.

    round 1   ours  theirs  others   ─► ratios, differences, … ─┐
    round 2   ours  theirs  others   ─► ratios, differences, … ─┼─► medians
    round 3   ours  theirs  others   ─► ratios, differences, … ─┘

A turn measures one setting in fresh processes. The turns of a round follow each other, so a machine that slows down for
a while slows both sides of a ratio.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Output = Mapping[str, Any]  # figures of one turn by name: numbers, or a text where there is no number
Round = Mapping[str, Output]  # by the names of the settings


@dataclasses.dataclass(frozen=True)
class Finding:
    """A figure that follows from the outputs of one round; its median over the rounds counts.

    Args:
        text: What the figure says.
        of: Computes it.
        at_least: The least to reach; None for no such limit.
        at_most: The most to stay under; None for no such limit.
    """

    text: str
    of: Callable[[Round], float]
    at_least: float | None = None
    at_most: float | None = None

    def finding_of(self, result: Result) -> Finding:
        """Return itself: the same for all results."""
        return self

    def met_by(self, value: float) -> bool:
        """Return whether a value is within the limits."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclasses.dataclass(frozen=True)
class Target:
    """The ratio of the best of some settings to the best of others, in the figure of their experiment.

    Args:
        ours: Names of settings.
        theirs: Names of settings.
        at_least: The ratio to reach; None for no such limit.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    at_least: float | None = None

    def finding_of(self, result: Result) -> Finding:
        """Return the ratio of the two settings with the best medians.

        Args:
            result: All rounds.
        """
        figure = result.experiment.figure
        ours, theirs = (max(names, key=lambda name: result.median(name, figure)) for names in (self.ours, self.theirs))
        return Finding(
            f"{ours} / {theirs}", lambda outputs: outputs[ours][figure] / outputs[theirs][figure], self.at_least
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named comparison.

    Args:
        name: What the command line calls it.
        summary: One line: what is measured, against what.
        figure: The figure of an output that matters most; the table shows how far it differs between rounds.
        settings: What is measured, dataclasses by name, in the order of their turns.
        measure: Runs one setting in fresh processes and returns its figures.
        findings: What to report.
        has_rounds: Whether figures differ from round to round; otherwise one round is all.
    """

    name: str
    summary: str
    figure: str
    settings: Mapping[str, Any]
    measure: Callable[[Any], Output]
    findings: tuple[Finding | Target, ...] = ()
    has_rounds: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """The outputs of all rounds of an experiment."""

    experiment: Experiment
    rounds: Sequence[Round]

    @property
    def findings(self) -> list[Finding]:
        """The findings, with the best settings chosen where a target leaves the choice."""
        return [finding.finding_of(self) for finding in self.experiment.findings]

    def figures(self, setting: str, figure: str) -> list[float]:
        """Return a figure of a setting, one value a round."""
        return [outputs[setting][figure] for outputs in self.rounds]

    def median(self, setting: str, figure: str) -> float:
        """Return the median of a figure of a setting over the rounds."""
        return statistics.median(self.figures(setting, figure))

    def found(self, finding: Finding) -> float:
        """Return the median of a finding over the rounds."""
        return statistics.median(finding.of(outputs) for outputs in self.rounds)

    def met(self, finding: Finding) -> bool:
        """Return whether the median of a finding is within its limits."""
        return finding.met_by(self.found(finding))


def run_rounds(
    experiment: Experiment,
    num_rounds: int,
    report: Callable[[str], None] = lambda line: None,
    finished: Sequence[Round] = (),
    save: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Give every setting its turn once a round, one after the other.

    Args:
        experiment: What to measure.
        num_rounds: Rounds, at least 1; an experiment without rounds has one.
        report: Gets a line for each output as it comes.
        finished: Rounds of an earlier run, which count.
        save: Gets the result after each round.

    Returns:
        All outputs.

    Raises:
        ValueError: If `num_rounds` is below 1.

    Example:
        >>> result = run_rounds(experiment, 5)
        >>> result.found(result.findings[0])
        6.4
    """
    if num_rounds < 1:
        raise ValueError(f"An experiment needs at least 1 round, received {num_rounds}.")
    num_rounds = num_rounds if experiment.has_rounds else 1
    rounds = list(finished)
    result = Result(experiment, rounds)
    for number in range(len(rounds) + 1, num_rounds + 1):
        outputs: dict[str, Output] = {}
        for name, setting in experiment.settings.items():
            outputs[name] = experiment.measure(setting)
            figures = ", ".join(" ".join(shown(figure, value)) for figure, value in outputs[name].items())
            report(f"{experiment.name}, round {number} of {num_rounds}: {name}: {figures}")
        rounds.append(outputs)
        save(result)
    return result


def shown(figure: str, value: Any) -> tuple[str, str]:
    """Return a figure's title and its value, in the unit that suits a reader.

    Args:
        figure: Its name; `_seconds` are shown in ms, `_bytes` in MB.
        value: Its value.

    Example:
        >>> shown("step_seconds", 0.0125)
        ('step ms', '12.5')
    """
    title = figure.replace("_", " ")
    if not is_number(value):
        return title, str(value)
    for suffix, unit, factor in (("_seconds", " ms", 1e3), ("_bytes", " MB", 1e-6)):
        if figure.endswith(suffix):
            return title[: -len(suffix)] + unit, f"{factor * value:,.1f}"
    return title, f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def is_number(value: Any) -> bool:
    """Return whether a value of an output is a number, so that it has a median."""
    return isinstance(value, int | float)
