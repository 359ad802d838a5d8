"""What `fit` says where it resumes: its position, and the arguments that a checkpoint overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfpar.checkpoint import Position
from tfpar.messages import user_warnings


def place(position: Position) -> str:
    """Return a position in words.

    Args:
        position: The position of a run.

    Example:
        >>> place(Position(epoch=2, step=12))
        'epoch 2 and 12 steps of the next'
    """
    return f"epoch {position.epoch}" + (f" and {position.step} steps of the next" if position.step else "")


def describe(position: Position, epochs: int, directory: Path) -> str:
    """Return in a sentence where a run resumes, or that nothing is left to train.

    Args:
        position: The position of the checkpoint.
        epochs: The number of epochs at which training stops.
        directory: The folder of the checkpoints.
    """
    if position.stopped:
        return f"Nothing is left to train: a callback has ended the training in {directory} after {place(position)}."
    if position.epoch >= epochs:
        return f"Nothing is left to train: the checkpoint in {directory} is after {place(position)} of {epochs}."
    return f"Resuming after {place(position)}, of {epochs} epochs, from the checkpoint in {directory}."


def warn_of_ignored(began: Mapping[str, Any], program: Mapping[str, Any], rates: Mapping[str, float]) -> None:
    """Warn if the program has another seed or learning rate than the one that began the run.

    Args:
        began: The "seed" and the "rates" with which the run began, of its checkpoint.
        program: Those of the program that resumes it.
        rates: The learning rates of the checkpoint, which callbacks may have changed since.
    """
    for sentence in _ignored(began, program, rates):
        user_warnings.warn(sentence)


def _ignored(began: Mapping[str, Any], program: Mapping[str, Any], rates: Mapping[str, float]) -> Iterator[str]:
    way_out = "Train in a new folder of checkpoints for the new value to take effect."
    if "seed" in began and began["seed"] != program["seed"]:
        yield (
            f"seed={program['seed']} is ignored except for the order of shuffled arrays: the run resumes with the "
            f"weights and random numbers of seed={began['seed']}. {way_out}"
        )
    for name, rate in program["rates"].items():
        if name in rates and rate not in (rates[name], began.get("rates", {}).get(name, rate)):
            yield (
                f"The learning rate {rate:g} is ignored: the run resumes with {rates[name]:g}, that of its checkpoint. "
                f"{way_out} To change it in this run, set it in on_epoch_begin of a callback."
            )
