"""Rounds, medians and ratios: contenders take turns, each measurement in a fresh process. No TensorFlow here.

    round 1   ours  Keras  Keras with other settings   ─► ratio ─┐
    round 2   ours  Keras  Keras with other settings   ─► ratio ─┼─► median
    round 3   ours  Keras  Keras with other settings   ─► ratio ─┘

The processes of a round run next to each other, so a machine that slows down for a while slows both sides of a ratio.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Workload = Literal["host_bound", "cnn", "dense"]
TrainerName = Literal["keras", "tfpar", "tf_keras", "torch"]
Compression = Literal["bfloat16"]
CheckpointWriting = Literal["asynchronous", "synchronous"]
Figure = Literal["steps_per_second", "examples_per_second"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one process trains and measures.

    Args:
        workload: Model and data, see `benchmarks.workloads`.
        trainer: Who trains: Keras' `fit`, tfpar's, that of legacy tf_keras, or PyTorch.
        batch_size: Global batch size.
        num_steps: Steps of the timed call of `fit`.
        num_warm_up_steps: Steps of the call before, which compiles and is not timed.
        num_replicas: Logical CPUs that share each global batch; 1 for no strategy.
        cores: Processor cores that the process may use; None for all.
        intra_op_threads: Threads inside one operation; None for TensorFlow's choice.
        inter_op_threads: Operations at a time; None for TensorFlow's choice.
        steps_per_execution: What Keras' `compile` gets; tfpar is left to choose by itself.
        num_workers: Processes that train together, one core and one thread each; 1 for a process by itself.
        compression: What `tfpar.MultiWorker` gets.
        checkpoints: How tfpar writes a checkpoint every second; None for no checkpoints.
    """

    workload: Workload
    trainer: TrainerName
    batch_size: int
    num_steps: int
    num_warm_up_steps: int
    num_replicas: int = 1
    cores: int | None = None
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    steps_per_execution: int = 1
    num_workers: int = 1
    compression: Compression | None = None
    checkpoints: CheckpointWriting | None = None


class Timing(NamedTuple):
    """What one measurement took.

    Args:
        training_seconds: From the call of `fit` to its `on_train_end`; this is what counts.
        return_seconds: From there until `fit` returned, which is no training (see `benchmarks.worker`).
        processor_seconds: What all threads of the process spent in training; on a core of its own, the difference to
            `training_seconds` is waiting, for peers or for others who use the machine.
    """

    training_seconds: float
    return_seconds: float
    processor_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Target:
    """The best of some contenders shall be at least so many times as fast as the best of others.

    Args:
        ours: Names of contenders.
        theirs: Names of contenders.
        at_least: The ratio to reach; 0 where it is only told.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    at_least: float = 0.0


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named comparison.

    Args:
        name: What the command line calls it.
        summary: One line: what is trained, and against what.
        figure: What is compared.
        contenders: Measurements by name, in the order of their turns.
        targets: The ratios to report.
    """

    name: str
    summary: str
    figure: Figure
    contenders: Mapping[str, Measurement]
    targets: tuple[Target, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The ratio that a target found, and between whom."""

    target: Target
    ours: str
    theirs: str
    ratio: float

    @property
    def met(self) -> bool:
        """Whether the ratio is reached."""
        return self.ratio >= self.target.at_least


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of all rounds of an experiment.

    Args:
        experiment: What was measured.
        timings: For each contender one timing a round.
    """

    experiment: Experiment
    timings: Mapping[str, Sequence[Timing]]

    @property
    def figures(self) -> dict[str, list[float]]:
        """For each contender one figure a round."""
        return {name: [self._per_second(name, timing) for timing in timings] for name, timings in self.timings.items()}

    def _per_second(self, contender: str, timing: Timing) -> float:
        measurement = self.experiment.contenders[contender]
        steps_per_second = measurement.num_steps / timing.training_seconds
        examples_per_second = steps_per_second * measurement.batch_size
        return steps_per_second if self.experiment.figure == "steps_per_second" else examples_per_second

    def median(self, contender: str) -> float:
        """Return the median of a contender's rounds."""
        return statistics.median(self.figures[contender])

    def outcomes(self) -> list[Outcome]:
        """Return what came of each target.

        The best contender on either side is the one with the best median; the ratio of the two is taken within each
        round, and its median over the rounds is reported.
        """
        return [self._outcome(target) for target in self.experiment.targets]

    def _outcome(self, target: Target) -> Outcome:
        ours = max(target.ours, key=self.median)
        theirs = max(target.theirs, key=self.median)
        pairs = zip(self.figures[ours], self.figures[theirs], strict=True)
        return Outcome(target, ours, theirs, statistics.median(our / their for our, their in pairs))

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "name": self.experiment.name,
            "summary": self.experiment.summary,
            "figure": self.experiment.figure,
            "contenders": {
                name: {
                    "median": self.median(name),
                    "rounds": self.figures[name],
                    "timings": [timing._asdict() for timing in self.timings[name]],
                    "measurement": dataclasses.asdict(measurement),
                }
                for name, measurement in self.experiment.contenders.items()
            },
            "targets": [
                {
                    "ours": outcome.ours,
                    "theirs": outcome.theirs,
                    "ratio": outcome.ratio,
                    "at_least": outcome.target.at_least,
                    "met": outcome.met,
                }
                for outcome in self.outcomes()
            ],
        }


def run_rounds(
    experiment: Experiment,
    num_rounds: int,
    measure: Callable[[Measurement], Timing],
    report: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure every contender once a round, one after the other.

    Args:
        experiment: What to measure.
        num_rounds: Rounds, at least 1.
        measure: Runs one measurement.
        report: Is told each figure as it comes.

    Returns:
        All figures.

    Raises:
        ValueError: If `num_rounds` is below 1.

    Example:
        >>> result = run_rounds(experiment, 5, measure)
        >>> result.outcomes()[0].ratio
        6.4
    """
    if num_rounds < 1:
        raise ValueError(f"An experiment needs at least 1 round, received {num_rounds}.")
    timings: dict[str, list[Timing]] = {name: [] for name in experiment.contenders}
    result = Result(experiment, timings)
    for number in range(1, num_rounds + 1):
        for name, measurement in experiment.contenders.items():
            timings[name].append(measure(measurement))
            report(f"{experiment.name}, round {number} of {num_rounds}: {name} {result.figures[name][-1]:,.0f}")
    return result
