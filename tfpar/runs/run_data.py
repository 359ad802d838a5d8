"""The data of a trainer class, as the train command uses them: checked, and arrays as global batches."""

from __future__ import annotations

import operator
import types
from typing import Any

import keras
import tensorflow as tf

from tfpar import config, data
from tfpar.data.batching import arrays
from tfpar.messages.received import quoted
from tfpar.runs.run_trainer import RunTrainer

_KINDS = (
    "a tf.data.Dataset or keras.utils.PyDataset of global batches, a generator of them, or arrays (inputs, targets)"
)


def training_batches(run: config.Run, trainer: RunTrainer) -> Any:
    """Return the training data in one argument, as `Trainer.fit` takes them.

    Args:
        run: The run, whose global batch and seed count for arrays: they are shuffled in each epoch.
        trainer: The trainer of the run.

    Returns:
        `train_data` itself, or a dataset of its arrays.
    """
    return _batches(run, trainer.train_data, shuffle=True)


def validation_batches(run: config.Run, trainer: RunTrainer) -> Any:
    """Return the validation data in one argument, as `Trainer.evaluate` takes them; None without any.

    Args:
        run: The run, whose global batch counts for arrays.
        trainer: The trainer of the run.
    """
    return None if trainer.validation_data is None else _batches(run, trainer.validation_data, shuffle=False)


def _batches(run: config.Run, given: Any, shuffle: bool) -> Any:
    if data.is_dataset(given):
        return given
    batch_size = run.training.global_batch_size
    return data.as_dataset(*_parts(given), batch_size=batch_size, shuffle=shuffle, seed=run.seed)


def _parts(given: Any) -> tuple[Any, ...]:
    """Return inputs, targets and weights of arrays, as Keras divides a tuple of validation data."""
    parts: tuple[Any, ...] = keras.utils.unpack_x_y_sample_weight(given)
    return parts


def num_steps(run: config.Run, given: Any) -> int | None:
    """Return the number of steps of a pass over training or validation data; None if it is not known before.

    Args:
        run: The run, whose global batch counts for arrays.
        given: The data of its trainer.

    Raises:
        ValueError: If they have no end.
        TypeError: If they are no data.
    """
    if isinstance(given, types.GeneratorType):
        return None
    if isinstance(given, keras.utils.PyDataset):
        return _num_batches(given)
    if hasattr(given, "cardinality"):
        number = int(given.cardinality())
        return None if number == tf.data.UNKNOWN_CARDINALITY else number
    if data.is_dataset(given):
        return _length(given)
    return -(-arrays.num_rows(_parts(given)) // run.training.global_batch_size)


def _num_batches(given: keras.utils.PyDataset) -> int | None:
    try:
        number = given.num_batches
    except NotImplementedError:  # without `__len__`
        number = None
    if number is None:
        raise ValueError("a PyDataset must end, as an epoch is one pass over it: return its batches from __len__")
    return int(number)


def _length(given: Any) -> int | None:
    try:
        return len(given)
    except TypeError:  # such as a DataLoader of an IterableDataset
        return None


def check(run: config.Run, trainer: RunTrainer) -> None:
    """Refuse data with which a run cannot begin, or would not end.

    Args:
        run: The run.
        trainer: Its trainer, with the attributes of its data.

    Raises:
        ValueError: If they are no data, or have no end.
    """
    _check_kind(run, "train_data", trainer.train_data)
    if trainer.validation_data is not None:
        _check_kind(run, "validation_data", trainer.validation_data)
    if isinstance(trainer.validation_data, types.GeneratorType):
        raise ValueError(
            f"validation_data of {run.trainer} must be data that can be read in each epoch and at the end, received a "
            "generator, which is read once: use tf.data.Dataset.from_generator, or a keras.utils.PyDataset."
        )
    number = trainer.num_train_examples
    if number is not None and not _is_count(number):
        raise ValueError(
            f"num_train_examples of {run.trainer} must be a whole number of at least 0, received {quoted(number)}: set "
            "None where it is not known."
        )


def _is_count(number: Any) -> bool:
    try:
        return operator.index(number) >= 0
    except TypeError:
        return False


def _check_kind(run: config.Run, name: str, given: Any) -> None:
    if given is None:
        raise ValueError(f"{name} of {run.trainer} must be {_KINDS}, received None.")
    try:
        steps = num_steps(run, given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} of {run.trainer} must be {_KINDS}, received {quoted(given)}: {error}") from error
    if steps == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"{name} of {run.trainer} must end, as an epoch is one pass over it, and it is repeated without end: leave "
            "out repeat(), or add take(steps) for epochs of so many steps."
        )
