"""The interface that the train command expects of trainer classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import keras

from tfpar.checkpoint import Checkpoints
from tfpar.data.sharding_policy import ALL_READ
from tfpar.strategies import Strategy

BY_BATCH = f"by batch: {ALL_READ}"


class RunTrainer(Protocol):
    """Protocol of trainer classes for the train command: a `tfpar.Trainer` with its data.

    Subclass `tfpar.Trainer`, which has all the methods, with a constructor that takes `(run, strategy)` and sets the
    three data attributes. Three more attributes are optional:

        sharding       how workers share the training examples, as a sentence
        class_names    the names of the classes
        report         a method that takes the results and returns a text for the chief to print at the end, or None.
                       All workers call it, so it may call `predict`.

    Attributes:
        train_data: Training batches `(inputs, targets)` or `(inputs, targets, sample_weights)` of shape
            `[global_batch_size, ...]`, in any form that `fit` accepts, or a tuple of arrays `[num_examples, ...]`.
        validation_data: Validation data in the same forms, except a generator; None to train without validation.
        num_train_examples: Number of training examples; None if unknown before the first epoch.

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
        """Compile the steps for a dataset, and return its first batch."""

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
        """Train, from the latest checkpoint if there is one."""

    def evaluate(self, x: Any, *, verbose: Any, steps: int | None = None, return_dict: bool = False) -> Any:
        """Compute the loss and metrics."""

    def interrupt(self) -> None:
        """Stop `fit` after the current step, with a checkpoint."""

    def save(self, path: str | Path) -> None:
        """Save the model as a plain Keras file."""


def sharding(trainer: RunTrainer) -> str:
    """Return how the workers share the training examples, by batch unless the trainer says otherwise."""
    return str(getattr(trainer, "sharding", BY_BATCH))


def class_names(trainer: RunTrainer) -> tuple[str, ...]:
    """Return the names of the classes, if the trainer has any."""
    return tuple(getattr(trainer, "class_names", None) or ())


def final_report(trainer: RunTrainer, results: dict[str, float]) -> str | None:
    """Return the trainer's own report on the figures of `results.json`, if it has one."""
    report = getattr(trainer, "report", None)
    text = None if report is None else report(results)
    return None if text is None else str(text)
