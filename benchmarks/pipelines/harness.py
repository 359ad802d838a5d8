"""Experiments about pipelines: settings take turns, findings are taken within each round. No TensorFlow here.

    round 1   ours  one core  torch   ─► torch / ours, efficiency, … ─┐
    round 2   ours  one core  torch   ─► torch / ours, efficiency, … ─┼─► medians
    round 3   ours  one core  torch   ─► torch / ours, efficiency, … ─┘

`benchmarks.harness` compares the speed of one call of `fit`; here a turn may answer with several figures (seconds,
bytes, what was predicted), and a finding may be any function of the answers of one round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Workload = Literal["mlp", "transformer", "wide", "resnet50"]
TrainerName = Literal["pipeline", "one_device", "keras", "torch"]
Question = Literal["laps", "prediction", "memory", "first_step"]
Answer = Mapping[str, float]
Round = Mapping[str, Answer]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained in one turn, by whom, and what is asked.

    Args:
        workload: Model and data, see `benchmarks.pipelines.examples`.
        trainer: `tfpar.Pipeline`, `tfpar.SingleDevice` (the whole batch at once), Keras' `fit`, or
            `torch.distributed.pipelining` in one process a stage.
        num_microbatches: Micro-batches of a step; of a trainer without any they only make the batch.
        microbatch_size: Rows of a micro-batch.
        schedule: Name of the schedule.
        num_stages: Stages.
        num_devices: Logical CPUs, of one core and one thread each.
        recompute: Whether stages keep only their inputs.
        balance: What `tfpar.Pipeline` balances the stages by.
        question: "laps" asks for the time of a step, "prediction" also for what the simulator says, "memory" for the
            most bytes of a step, "first_step" for the seconds until the first step is done, with all cores and
            TensorFlow's own choice of threads.
        num_laps: Timed groups of steps; the group before them compiles and is not timed.
        steps_per_lap: Steps of a group.
    """

    workload: Workload
    trainer: TrainerName
    num_microbatches: int
    microbatch_size: int
    schedule: str = "1f1b"
    num_stages: int = 2
    num_devices: int = 2
    recompute: bool = False
    balance: str = "time"
    question: Question = "laps"
    num_laps: int = 5
    steps_per_lap: int = 20

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.num_microbatches * self.microbatch_size


@dataclasses.dataclass(frozen=True)
class Finding:
    """A figure that follows from the answers of one round; its median over the rounds counts.

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


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named comparison.

    Args:
        name: What the command line calls it.
        summary: One line: what is measured, against what.
        settings: By name, in the order of their turns.
        findings: What to report.
    """

    name: str
    summary: str
    settings: Mapping[str, Setting]
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """The answers of all rounds of an experiment, by the names of its settings."""

    experiment: Experiment
    rounds: Sequence[Round]

    def median(self, setting: str, figure: str) -> float:
        """Return the median of a figure over the rounds.

        Args:
            setting: Its name.
            figure: A name in its answers.
        """
        return statistics.median(answers[setting][figure] for answers in self.rounds)

    def found(self, finding: Finding) -> float:
        """Return the median of a finding over the rounds."""
        return statistics.median(finding.of(answers) for answers in self.rounds)

    def met(self, finding: Finding) -> bool:
        """Return whether a finding keeps to its limits."""
        value = self.found(finding)
        return (finding.at_least is None or value >= finding.at_least) and (
            finding.at_most is None or value <= finding.at_most
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "name": self.experiment.name,
            "summary": self.experiment.summary,
            "settings": {
                name: {
                    "setting": dataclasses.asdict(setting),
                    "medians": {figure: self.median(name, figure) for figure in self.rounds[0][name]},
                    "rounds": [dict(answers[name]) for answers in self.rounds],
                }
                for name, setting in self.experiment.settings.items()
            },
            "findings": [
                {
                    "text": finding.text,
                    "value": self.found(finding),
                    "rounds": [finding.of(answers) for answers in self.rounds],
                    "at_least": finding.at_least,
                    "at_most": finding.at_most,
                    "met": self.met(finding),
                }
                for finding in self.experiment.findings
            ],
        }


def shown(figure: str, value: float) -> tuple[str, str]:
    """Return a figure's title and its value, in the unit that suits a reader.

    Args:
        figure: Its name; `_seconds` are shown in ms, `_bytes` in MB.
        value: Its value.

    Example:
        >>> shown("step_seconds", 0.0125)
        ('step ms', '12.5')
    """
    for suffix, unit, factor in (("_seconds", " ms", 1e3), ("_bytes", " MB", 1e-6)):
        if figure.endswith(suffix):
            return figure.removesuffix(suffix).replace("_", " ") + unit, f"{factor * value:,.1f}"
    return figure.replace("_", " "), f"{value:,.0f}"


def run_rounds(
    experiment: Experiment,
    num_rounds: int,
    measure: Callable[[Setting], Answer],
    report: Callable[[str], None] = lambda line: None,
) -> Result:
    """Give every setting its turn once a round, one after the other.

    Args:
        experiment: What to measure.
        num_rounds: Rounds, at least 1.
        measure: Runs one setting and returns its figures.
        report: Is told each answer as it comes.

    Returns:
        All answers.

    Raises:
        ValueError: If `num_rounds` is below 1.
    """
    if num_rounds < 1:
        raise ValueError(f"An experiment needs at least 1 round, received {num_rounds}.")
    rounds: list[Round] = []
    for number in range(1, num_rounds + 1):
        answers: dict[str, Answer] = {}
        for name, setting in experiment.settings.items():
            answers[name] = measure(setting)
            told = ", ".join(" ".join(shown(figure, value)) for figure, value in answers[name].items())
            report(f"{experiment.name}, round {number} of {num_rounds}: {name}: {told}")
        rounds.append(answers)
    return Result(experiment, rounds)
