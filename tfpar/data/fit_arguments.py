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
    """Return whether `x` yields batches with targets and weights: a dataset, a generator, a DataLoader; no arrays."""
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
    """Return the data arguments of `keras.Model.fit` as global batches: datasets unchanged, arrays batched.

    Args:
        x: A `tf.data.Dataset` or `Sharded`; a `keras.utils.PyDataset`, a generator or a torch `DataLoader`; or arrays
            `[examples, ...]`, as for `from_arrays`.
        y: Targets where `x` is arrays, else None.
        sample_weight: Weights where `x` is arrays, else None.
        batch_size: Global batch of arrays; None for 32, or for the size that gives `steps` batches, as in Keras.
        steps: Steps per epoch, if the user set them.
        shuffle: Whether arrays, and the batches of a PyDataset, have another order in every epoch.
        seed: Fixes the order of arrays.
        class_weight: Weight of each class's examples.

    Raises:
        ValueError: If targets or weights are given with a dataset, or the dataset is one of `tf.distribute`.
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
            "Pass the tf.data.Dataset that it was made of, batched to the global batch."
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
    """Return global batches of any kind as a dataset that one process reads.

    Args:
        batches: The result of `as_dataset`. Python code runs in each pass, without the hooks of an epoch; call
            `PythonBatches.stop` after the last one.

    >>> [batch.shape[0] for (batch,) in global_batches(as_dataset(tf.zeros([5, 2]), batch_size=2))]
    [2, 2, 1]
    """
    if isinstance(batches, Sharded):
        return batches.global_batches()
    return batches.dataset if isinstance(batches, PythonBatches) else batches


def hold_out(given: tuple[Any, Any, Any], share: float) -> tuple[Any, Any]:
    """Split the last rows of arrays off for validation, as `keras.Model.fit(validation_split=...)` does.

    Args:
        given: `(x, y, sample_weight)`, None where there is none.
        share: Part of the rows to split off, above 0 and below 1.

    Returns:
        The same structure twice: the rows to train on, and the rows held out.

    Raises:
        ValueError: A dataset instead of arrays, or a share that leaves one side empty.
    """
    if is_dataset(given[0]):
        raise ValueError(
            "validation_split needs arrays, but x is a dataset: use take and skip on a tf.data.Dataset, or "
            "pass validation_data."
        )
    return arrays.hold_out(given, share)


def _default_batch_size(given: Any, steps: int | None) -> int:
    return math.ceil(arrays.num_rows(given) / steps) if steps else DEFAULT_BATCH_SIZE
