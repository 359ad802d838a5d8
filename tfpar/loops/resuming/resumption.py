"""Checks and messages where a run resumes: its position, its data, and the arguments that the checkpoint overrides.

written   8 steps per epoch, batches of 8      0 1 2 3 │ 4 5 6 7
resumed   4 steps per epoch, batches of 16             │ the epoch is over: half of its examples are never trained on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfpar.checkpoint import Position
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.messages import user_warnings

_SAME_DATA = "Resume with the same data and batch size; they may change where an epoch begins."


def place(position: Position) -> str:
    """Return a position in words.

    Example:
        >>> place(Position(epoch=2, step=12))
        'epoch 2 and 12 steps of the next'
    """
    return f"epoch {position.epoch}" + (f" and {position.step} steps of the next" if position.step else "")


def describe(position: Position, epochs: int, directory: Path) -> str:
    """Return a sentence about where a run resumes, or that nothing is left to train.

    Args:
        position: The position of the checkpoint.
        epochs: Epoch at which training stops.
        directory: The folder of the checkpoints.
    """
    if position.stopped:
        return f"Nothing is left to train: a callback has ended the training in {directory} after {place(position)}."
    if position.epoch >= epochs:
        return f"Nothing is left to train: the checkpoint in {directory} is after {place(position)} of {epochs}."
    return f"Resuming after {place(position)}, of {epochs} epochs, from the checkpoint in {directory}."


def warn_about_ignored(began: Mapping[str, Any], program: Mapping[str, Any], rates: Mapping[str, float]) -> None:
    """Warn if the seed or a learning rate of the program is ignored because the run began with another one.

    Args:
        began: The "seed" and learning "rates" with which the run began, from its checkpoint.
        program: The same of the program that resumes it.
        rates: The learning rates in the checkpoint, which callbacks may have changed.
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


def with_data(position: Position, epoch_iterator: EpochIterator) -> Position:
    """Return a position with the steps per epoch and the batch size of the data."""
    steps = epoch_iterator.steps_per_epoch or 0
    return dataclasses.replace(position, steps_per_epoch=steps, batch_size=epoch_iterator.batch_size)


def check_position(position: Position, epoch_iterator: EpochIterator) -> None:
    """Raise an error if a run would resume within an epoch of another length; warn if batches have another size.

    The size of the first batch of a shuffled dataset may vary, so it is not an error.

    Args:
        position: The position at which the run resumes.
        epoch_iterator: The data of the resumed run.

    Raises:
        ValueError: If the position is within an epoch, and the epoch has another number of steps now.
    """
    now = with_data(position, epoch_iterator)
    size_differs = position.batch_size and position.batch_size != now.batch_size
    if position.step and 0 < position.steps_per_epoch != now.steps_per_epoch > 0:
        raise ValueError(
            f"The checkpoint was written after step {position.step} of an epoch of {_epoch(position)}, received an "
            f"epoch of {_epoch(now)}. {_SAME_DATA}"
        )
    if position.batches and size_differs:
        user_warnings.warn(
            f"The run resumes after {position.batches} batches of the data. They had {position.batch_size} examples "
            f"where the checkpoint was written, and the first one has {now.batch_size} now. {_SAME_DATA}"
        )


def _epoch(position: Position) -> str:
    return f"{position.steps_per_epoch} steps with batches of {position.batch_size} examples"
