"""The data arguments of `keras.Model.fit`, `evaluate` and `predict` as global batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpar._compat import keras_data_adapters
from tfpar.data.batching import arrays
from tfpar.data.batching.arrays import Shuffle, from_arrays
from tfpar.data.batching.batches import class_weights
from tfpar.data.python_batches import PythonBatches
from tfpar.data.sharding.sharded import Sharded
from tfpar.messages.whole_numbers import check_whole_number

DEFAULT_BATCH_SIZE = 32
Batches: TypeAlias = tf.data.Dataset | Sharded | PythonBatches


def is_dataset(x: Any) -> bool:
    """Return whether `x` yields batches with their targets (a dataset, generator or DataLoader), unlike arrays."""
    return isinstance(x, tf.data.Dataset | Sharded | PythonBatches) or keras_data_adapters.is_python_source(x)


def as_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Shuffle = False,
    seed: int = 0,
    class_weight: Mapping[int, float] | None = None,
) -> Batches:
    """Convert the data arguments of `keras.Model.fit` to global batches: datasets unchanged, arrays batched.

    Args:
        x: A `tf.data.Dataset` or `Sharded`; a `keras.utils.PyDataset`, a generator or a torch `DataLoader`; or arrays
            `[examples, ...]`, as for `from_arrays`.
        y: Targets if `x` is arrays, else None.
        sample_weight: Sample weights if `x` is arrays, else None.
        batch_size: Global batch size of arrays; None for 32, or, as in Keras, for `steps` batches.
        steps: Steps per epoch, if set by the user.
        shuffle: Whether to shuffle arrays, and the batches of a PyDataset, in every epoch.
        seed: Seed of the order of arrays.
        class_weight: Weight of the examples of each class.

    Raises:
        ValueError: If targets or weights are passed with a dataset, or the dataset is one of `tf.distribute`.
        TypeError: If `x` is neither a dataset nor arrays.

    >>> len(as_dataset(tf.zeros([5, 2]), tf.zeros([5]), batch_size=2))
    3
    """
    if isinstance(x, PythonBatches):
        return x
    if keras_data_adapters.is_python_source(x):
        return PythonBatches(x, y, sample_weight, class_weight, bool(shuffle))
    if isinstance(x, tf.distribute.DistributedDataset):
        raise ValueError(
            "A strategy of tfpar distributes the batches itself, received a DistributedDataset of tf.distribute. "
            "Pass the tf.data.Dataset that it was made from, batched to the global batch."
        )
    if is_dataset(x) and (y is not None or sample_weight is not None):
        raise ValueError(
            "Targets and weights are part of a dataset, received a dataset with y or sample_weight. Let the dataset "
            "yield (inputs, targets, sample_weight)."
        )
    if batch_size is not None:
        check_whole_number("batch_size", batch_size)
    dtype = None if is_dataset(x) else keras.config.floatx()
    if not is_dataset(x):
        size = batch_size or _default_batch_size((x, y, sample_weight), steps)
        x = from_arrays(x, y, sample_weight, batch_size=size, shuffle=shuffle, seed=seed)
    dataset: Batches = x if class_weight is None else class_weights(x, class_weight, dtype)
    return dataset


def global_batches(batches: Batches) -> tf.data.Dataset:
    """Return the result of `as_dataset` as a `tf.data.Dataset` for one process.

    Args:
        batches: The batches. `PythonBatches` run in each pass without the hooks of an epoch; call their `stop` after
            the last pass.

    >>> [batch.shape[0] for batch in global_batches(as_dataset(tf.zeros([5, 2]), batch_size=2))]
    [2, 2, 1]
    """
    if isinstance(batches, Sharded):
        return batches.global_batches()
    return batches.dataset if isinstance(batches, PythonBatches) else batches


def hold_out(arguments: tuple[Any, Any, Any], share: float) -> tuple[Any, Any]:
    """Hold out the last rows of arrays for validation, as `keras.Model.fit(validation_split=...)` does.

    Args:
        arguments: `(x, y, sample_weight)`, with None for what is missing.
        share: Fraction of the rows to hold out, above 0 and below 1.

    Returns:
        The rows to train on and the rows held out, in the same structure.

    Raises:
        ValueError: If `x` is a dataset, or one side would be empty.
    """
    if is_dataset(arguments[0]):
        raise ValueError(
            "validation_split needs arrays, but x is a dataset: use take and skip on a tf.data.Dataset, or "
            "pass validation_data."
        )
    return arrays.hold_out(arguments, share)


def _default_batch_size(arguments: Any, steps: int | None) -> int:
    return math.ceil(arrays.num_rows(arguments) / steps) if steps else DEFAULT_BATCH_SIZE
