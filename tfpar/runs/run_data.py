"""The data of a trainer: checks, and batches of arrays."""

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
    """Return the training data as a single argument for `Trainer.fit`.

    Arrays become a dataset of global batches, which is shuffled in each epoch with the seed of the run.
    """
    return _batches(run, trainer.train_data, shuffle=True)


def validation_batches(run: config.Run, trainer: RunTrainer) -> Any:
    """Return the validation data as a single argument for `Trainer.evaluate`, if there is any."""
    return None if trainer.validation_data is None else _batches(run, trainer.validation_data, shuffle=False)


def _batches(run: config.Run, source: Any, shuffle: bool) -> Any:
    if data.is_dataset(source):
        return source
    unpacked = keras.utils.unpack_x_y_sample_weight(source)
    return data.as_dataset(*unpacked, batch_size=run.training.global_batch_size, shuffle=shuffle, seed=run.seed)


def num_steps(run: config.Run, source: Any) -> int | None:
    """Return the number of steps in a pass over training or validation data; None if unknown.

    Raises:
        ValueError: If a `PyDataset` has no length.
        TypeError: If `source` is neither a dataset nor arrays.
    """
    if isinstance(source, types.GeneratorType):
        return None
    if isinstance(source, keras.utils.PyDataset):
        return _num_batches(source)
    if hasattr(source, "cardinality"):
        number = int(source.cardinality())
        return None if number == tf.data.UNKNOWN_CARDINALITY else number
    if data.is_dataset(source):
        return _length(source)
    num_rows = arrays.num_rows(keras.utils.unpack_x_y_sample_weight(source))
    return -(-num_rows // run.training.global_batch_size)


def _num_batches(source: keras.utils.PyDataset) -> int | None:
    try:
        number = source.num_batches
    except NotImplementedError:  # without `__len__`
        number = None
    if number is None:
        raise ValueError("a PyDataset must end, as an epoch is one pass over it: return its batches from __len__")
    return int(number)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:  # such as a DataLoader of an IterableDataset
        return None


def check(run: config.Run, trainer: RunTrainer) -> None:
    """Check that the data of a trainer have a supported type and an end.

    Raises:
        ValueError: If they do not.
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


def _check_kind(run: config.Run, name: str, source: Any) -> None:
    if source is None:
        raise ValueError(f"{name} of {run.trainer} must be {_KINDS}, received None.")
    try:
        steps = num_steps(run, source)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} of {run.trainer} must be {_KINDS}, received {quoted(source)}: {error}") from error
    if steps == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"{name} of {run.trainer} must end, as an epoch is one pass over it, and it is repeated without end: leave "
            "out repeat(), or add take(steps) for epochs of so many steps."
        )
