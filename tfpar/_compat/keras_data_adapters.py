"""Keras' own data adapters, which decide what `fit` takes and how Python code yields batches; all private.

Written for Keras 3.15 (`keras/src/trainers/data_adapters`), whose public API has no other way to the order in which a
`PyDataset` is read by its workers, nor to the rules on arguments that exclude each other.
"""

from __future__ import annotations

import itertools
import queue
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import potentially_ragged_concat
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from tfpar._compat import versions

# Keras 3.16 seeds the order of an epoch with its number, Keras 3.15 draws it from Python's `random`.
_NUMBERS_EPOCHS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
NUM_PEEKED = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC

is_scipy_sparse = data_adapter_utils.is_scipy_sparse
is_torch_tensor = data_adapter_utils.is_torch_tensor


def is_array(value: Any) -> bool:
    """Return whether Keras takes a value as an array."""
    return value is not None and bool(array_slicing.can_slice_array(value))


def is_pandas(value: Any) -> bool:
    """Return whether a value is a DataFrame or a Series; never where pandas is not installed."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series | pandas.DataFrame)


def pandas_values(frame: Any) -> Any:
    """Return the values as Keras takes them: floats in its float type, a Series as one column `[rows, 1]`."""
    return array_slicing.convert_to_sliceable(frame, target_backend="tensorflow")


def is_python_source(x: Any) -> bool:
    """Return whether `x` yields batches in Python: a PyDataset, a generator, a DataLoader or a user's adapter."""
    return (
        isinstance(x, DataAdapter | keras.utils.PyDataset | types.GeneratorType)
        or data_adapters.is_torch_dataloader(x)
        or data_adapters.is_grain_dataset(x)
    )


def adapter(x: Any, y: Any, sample_weight: Any, class_weight: Any, shuffle: bool) -> Any:
    """Return Keras' adapter of a Python source.

    Args:
        x: A source that `is_python_source` accepts.
        y: Must be None.
        sample_weight: Must be None.
        class_weight: Weight of each class; for a PyDataset only.
        shuffle: Whether a PyDataset of known length is read in a new order each time.

    Raises:
        ValueError: With Keras' words, where the arguments exclude each other.
    """
    # Keras warns about its default, shuffle=True, wherever it has no effect.
    shuffles = shuffle and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None
    return data_adapters.get_data_adapter(x, y, sample_weight, shuffle=shuffles, class_weight=class_weight)


def peek(adapter: Any) -> list[Any]:
    """Return the first batches, drawn as often as Keras draws them before the first epoch; none for other adapters."""
    if isinstance(adapter, GeneratorDataAdapter):
        return list(adapter._first_batches)
    if isinstance(adapter, TorchDataLoaderAdapter):
        return [_as_tuple(batch) for batch in itertools.islice(adapter._dataloader, NUM_PEEKED)]
    if isinstance(adapter, PyDatasetAdapter):
        num_batches = adapter.py_dataset.num_batches
        num_peeked = NUM_PEEKED if num_batches is None else min(NUM_PEEKED, num_batches)
        return [adapter._standardize_batch(adapter.py_dataset[index]) for index in range(num_peeked)]
    return []


def batches_of(adapter: Any) -> Iterator[Any]:
    """Begin a pass and yield its batches as the user's code made them."""
    if isinstance(adapter, GeneratorDataAdapter):
        return iter(adapter.generator())
    if isinstance(adapter, TorchDataLoaderAdapter):
        return map(_as_tuple, adapter._dataloader)
    iterator: Iterator[Any] = adapter._get_iterator()
    return iterator


def begin_training(adapter: Any) -> None:
    """Repeat Keras' preparation after its look at the shapes and before the first epoch."""
    if _is_numbered(adapter):
        versions.replace(adapter, "_epoch", 0)
    adapter.on_epoch_end()


def count_epoch(adapter: Any) -> None:
    """Set the order of the next pass to that of the next epoch."""
    if _is_numbered(adapter):
        versions.replace(adapter, "_epoch", adapter._epoch + 1)


def skip_order(adapter: Any) -> None:
    """Skip the order of one pass: use up its random numbers, so that the next pass has its own order."""
    if adapter.shuffle and not _is_numbered(adapter):
        random.shuffle(list(range(adapter.num_batches)))


def _is_numbered(adapter: Any) -> bool:
    return _NUMBERS_EPOCHS and isinstance(adapter, PyDatasetAdapter)


def stop_workers(adapter: Any) -> None:
    """Stop the threads or processes that prefetch a PyDataset, and drop the prefetched batches of an ended pass."""
    if not isinstance(adapter, PyDatasetAdapter):
        return
    enqueuer = versions.private(adapter, "enqueuer")  # None without workers
    if enqueuer is not None:
        enqueuer.stop()
        if adapter.num_batches is not None:
            versions.replace(enqueuer, "ready_queue", queue.Queue())


def spec_of(batches: list[Any]) -> Any:
    """Return the common `tf.TypeSpec` of some batches, `[None, ...]`, with None where the batches have None."""
    specs = data_adapter_utils.get_keras_tensor_spec(batches)
    return keras.tree.map_structure(
        lambda spec: None if spec is None else data_adapter_utils.convert_to_tf_tensor_spec(spec), specs
    )


def to_tensorflow(leaf: Any) -> Any:
    """Return an array of a batch in a form that `tf.data` takes."""
    if is_scipy_sparse(leaf):
        return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
    if is_torch_tensor(leaf):
        return leaf.detach().cpu().numpy()
    return leaf


def _as_tuple(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return tuple(batch)
    return batch if isinstance(batch, dict) else (batch,)


def join_unequal(parts: Sequence[Any]) -> Any:
    """Join outputs of several batches that are ragged, sparse, or of different sizes, as `keras.Model.predict` does."""
    return potentially_ragged_concat([tf.convert_to_tensor(p) if isinstance(p, np.ndarray) else p for p in parts])
