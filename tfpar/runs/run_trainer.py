"""The trainer of a run, as the train command uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import keras

from tfpar.checkpoint import Checkpoints
from tfpar.data.sharding_policy import ALL_READ
from tfpar.strategies import Strategy

BY_BATCH = f"by batch: {ALL_READ}"


class RunTrainer(Protocol):
    """A `tfpar.Trainer` with its data: the protocol of trainer classes for the train command.

    A subclass of `tfpar.Trainer` has all methods. Its constructor takes `(run, strategy)` and sets the three attributes
    of the data. Three more are optional, so they are no part of the protocol:

        sharding       how the workers share the training examples, a sentence for the printed plan
        class_names    the names of the classes, for the printed plan
        report         a method: takes the results and returns a text, which the chief prints at the end, or None; every
                       worker calls it, so it may predict

    Attributes:
        train_data: Training batches `(inputs, targets)` or `(inputs, targets, sample_weights)`, `[global batch, ...]`
            each, in any form that `fit` takes; or a tuple of such arrays `[examples, ...]`.
        validation_data: The same for validation, but no generator; None to train without.
        num_train_examples: The number of training examples; None if it is unknown before the first epoch ends.

    Example:
        >>> from tfpar import config
        >>> from tfpar.runs.run_trainer import RunTrainer
        >>> from tfpar.trainers.regression import Regression
        >>> run = config.load(None, ["model.name=linear", "data.source=generated", "data.num_examples=64"])
        >>> trainer: RunTrainer = Regression(run, tfpar.SingleDevice())
        >>> trainer.num_train_examples
        64
    """

    train_data: Any
    validation_data: Any
    num_train_examples: int | None
    model: keras.Model
    strategy: Strategy
    interrupted: bool

    def build(self, x: Any) -> Any:
        """Check and compile everything for a dataset, and return its first batch."""

    def fit(
        self,
        x: Any,
        *,
        epochs: int,
        verbose: Any,
        callbacks: Any,
        validation_data: Any,
        validation_freq: int,
        steps_per_call: int | None,
        checkpoints: Checkpoints | None,
        nonfinite_loss: Any,
    ) -> Any:
        """Train, from the newest checkpoint if there is one."""

    def evaluate(self, x: Any, *, verbose: Any, steps: int | None = None, return_dict: bool = False) -> Any:
        """Compute loss and metrics."""

    def interrupt(self) -> None:
        """Stop `fit` after the current step, with a checkpoint."""

    def save(self, path: str | Path) -> None:
        """Save the model as plain Keras."""


def sharding_of(trainer: RunTrainer) -> str:
    """Return how the workers share the training examples, in a sentence.

    Args:
        trainer: The trainer of a run; by batch if it has no attribute `sharding`.
    """
    return str(getattr(trainer, "sharding", BY_BATCH))


def class_names_of(trainer: RunTrainer) -> tuple[str, ...]:
    """Return the names of the classes; none for a trainer without the attribute `class_names`.

    Args:
        trainer: The trainer of a run.
    """
    return tuple(getattr(trainer, "class_names", None) or ())


def report_of(trainer: RunTrainer, results: dict[str, float]) -> str | None:
    """Return a trainer's report on its results; None for a trainer without one.

    Args:
        trainer: The trainer of a run.
        results: The figures of `results.json`.
    """
    report = getattr(trainer, "report", None)
    text = None if report is None else report(results)
    return None if text is None else str(text)
