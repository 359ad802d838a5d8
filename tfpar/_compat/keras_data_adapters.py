"""Keras 3.15's data adapters (`keras/src/trainers/data_adapters`), which define what `fit` accepts.

The public API exposes neither the order in which the workers of a `PyDataset` read it, nor the rules for arguments that
exclude each other.
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

# Keras 3.16 seeds the order of an epoch with its number; Keras 3.15 uses Python's `random`.
_NUMBERS_EPOCHS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
NUM_PEEKED = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC

is_scipy_sparse = data_adapter_utils.is_scipy_sparse
is_torch_tensor = data_adapter_utils.is_torch_tensor


def is_array(value: Any) -> bool:
    """Return whether Keras accepts a value as an array."""
    return value is not None and bool(array_slicing.can_slice_array(value))


def is_pandas(value: Any) -> bool:
    """Return whether a value is a pandas DataFrame or Series, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series | pandas.DataFrame)


def pandas_values(frame: Any) -> Any:
    """Convert a DataFrame or Series as Keras does: floats to floatx, a Series to a column `[num_rows, 1]`."""
    return array_slicing.convert_to_sliceable(frame, target_backend="tensorflow")


def is_python_source(x: Any) -> bool:
    """Return whether `x` yields batches in Python: a PyDataset, generator, DataLoader or custom adapter."""
    return (
        isinstance(x, DataAdapter | keras.utils.PyDataset | types.GeneratorType)
        or data_adapters.is_torch_dataloader(x)
        or data_adapters.is_grain_dataset(x)
    )


def adapter(x: Any, y: Any, sample_weight: Any, class_weight: Any, shuffle: bool) -> Any:
    """Return Keras' adapter of a Python source. The arguments are those of `fit`.

    Raises:
        ValueError: Keras' own error if arguments exclude each other.
    """
    # Keras warns about shuffle=True, its default, wherever it has no effect.
    shuffles = shuffle and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None
    return data_adapters.get_data_adapter(x, y, sample_weight, shuffle=shuffles, class_weight=class_weight)


def peek(adapter: Any) -> list[Any]:
    """Return the first batches, read as often as Keras reads them before the first epoch; none for other adapters."""
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
    """Begin a pass and yield its batches unconverted."""
    if isinstance(adapter, GeneratorDataAdapter):
        return iter(adapter.generator())
    if isinstance(adapter, TorchDataLoaderAdapter):
        return map(_as_tuple, adapter._dataloader)
    iterator: Iterator[Any] = adapter._get_iterator()
    return iterator


def begin_training(adapter: Any) -> None:
    """Prepare for the first epoch as Keras does after inspecting the first batches."""
    if _is_numbered(adapter):
        versions.replace(adapter, "_epoch", 0)
    adapter.on_epoch_end()


def count_epoch(adapter: Any) -> None:
    """Advance the order of the next pass to the next epoch."""
    if _is_numbered(adapter):
        versions.replace(adapter, "_epoch", adapter._epoch + 1)


def skip_order(adapter: Any) -> None:
    """Consume the random numbers of a skipped pass, so that the next pass has its own order."""
    if adapter.shuffle and not _is_numbered(adapter):
        random.shuffle(list(range(adapter.num_batches)))


def _is_numbered(adapter: Any) -> bool:
    return _NUMBERS_EPOCHS and isinstance(adapter, PyDatasetAdapter)


def stop_workers(adapter: Any) -> None:
    """Stop the workers that prefetch a PyDataset, and drop the batches prefetched for an ended pass."""
    if not isinstance(adapter, PyDatasetAdapter):
        return
    enqueuer = versions.private(adapter, "enqueuer")  # None without workers
    if enqueuer is not None:
        enqueuer.stop()
        if adapter.num_batches is not None:
            versions.replace(enqueuer, "ready_queue", queue.Queue())


def spec_of(batches: list[Any]) -> Any:
    """Return the common `tf.TypeSpec` of batches, `[None, ...]`, with None where the batches have None."""
    specs = data_adapter_utils.get_keras_tensor_spec(batches)
    return keras.tree.map_structure(
        lambda spec: None if spec is None else data_adapter_utils.convert_to_tf_tensor_spec(spec), specs
    )


def to_tensorflow(leaf: Any) -> Any:
    """Convert an array of a batch to a type that `tf.data` accepts."""
    if is_scipy_sparse(leaf):
        return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
    if is_torch_tensor(leaf):
        return leaf.detach().cpu().numpy()
    return leaf


def _as_tuple(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return tuple(batch)
    return batch if isinstance(batch, dict) else (batch,)


def join_unequal(outputs: Sequence[Any]) -> Any:
    """Concatenate outputs of batches that are ragged, sparse or of different shapes, as `keras.Model.predict` does."""
    tensors = [tf.convert_to_tensor(output) if isinstance(output, np.ndarray) else output for output in outputs]
    return potentially_ragged_concat(tensors)
