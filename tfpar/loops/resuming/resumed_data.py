"""The data of a resumed run, compared with those of its checkpoint.

written   8 steps an epoch, batches of 8      0 1 2 3 │ 4 5 6 7
resumed   4 steps an epoch, batches of 16             │ nothing is left of the epoch: half of the examples
                                                        would never be trained on
"""

from __future__ import annotations

import dataclasses

from tfpar.checkpoint import Position
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.messages import user_warnings

_WAY_OUT = "Resume with the same data and batch size; they may change where an epoch begins."


def with_data(position: Position, epoch_iterator: EpochIterator) -> Position:
    """Return a position with the steps of its epoch and the size of its batches.

    Args:
        position: The position of a run.
        epoch_iterator: Its data.
    """
    steps = epoch_iterator.steps_per_epoch or 0
    return dataclasses.replace(position, steps_per_epoch=steps, batch_size=epoch_iterator.batch_size)


def check_position(position: Position, epoch_iterator: EpochIterator) -> None:
    """Refuse to resume in the middle of an epoch of another length.

    The first batch of a shuffled dataset of batches of several sizes may differ each time, so other sizes alone are a
    warning.

    Args:
        position: The position at which a run resumes.
        epoch_iterator: The data of the resumed run.

    Raises:
        ValueError: If the position is within an epoch, and the epochs had another number of steps.
    """
    now = with_data(position, epoch_iterator)
    others = position.batch_size and position.batch_size != now.batch_size
    if position.step and 0 < position.steps_per_epoch != now.steps_per_epoch > 0:
        raise ValueError(
            f"The checkpoint was written after step {position.step} of an epoch of {_data(position)}, received an "
            f"epoch of {_data(now)}. {_WAY_OUT}"
        )
    if position.batches and others:
        user_warnings.warn(
            f"The run resumes after {position.batches} batches of the data. They had {position.batch_size} examples "
            f"where the checkpoint was written, and the first one has {now.batch_size} now. {_WAY_OUT}"
        )


def _data(position: Position) -> str:
    return f"{position.steps_per_epoch} steps with batches of {position.batch_size} examples"
