"""All arrays that Keras accepts as dense, ragged or sparse tensors with access to rows."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_data_adapters


class Column(abc.ABC):
    """Examples along the first axis."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """The number of examples."""

    @abc.abstractmethod
    def between(self, first: Any, size: int) -> Any:
        """Return the rows `first .. first + size - 1`, `[size, ...]`."""

    @abc.abstractmethod
    def at(self, rows: tf.Tensor, size: int) -> Any:
        """Return the rows with the numbers `rows`, `[size]` of them."""


@dataclasses.dataclass(frozen=True)
class Dense(Column):
    """A tensor `[rows, ...]`."""

    values: tf.Tensor

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return int(self.values.shape[0])

    def between(self, first: Any, size: int) -> tf.Tensor:
        """Return the rows `first .. first + size - 1`, `[size, ...]`."""
        rest = self.values.shape[1:]
        return tf.slice(self.values, [first] + [0] * len(rest), [size, *rest])

    def at(self, rows: tf.Tensor, size: int) -> tf.Tensor:
        """Return the rows with the numbers `rows`, `[size, ...]`."""
        return tf.gather(self.values, rows)


@dataclasses.dataclass(frozen=True)
class Ragged(Column):
    """A ragged tensor `[rows, ...]`."""

    values: tf.RaggedTensor

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return int(self.values.nrows())

    def between(self, first: Any, size: int) -> tf.RaggedTensor:
        """Return the rows `first .. first + size - 1`."""
        return self.values[first : first + size]

    def at(self, rows: tf.Tensor, size: int) -> tf.RaggedTensor:
        """Return the rows with the numbers `rows`."""
        return tf.gather(self.values, rows)


@dataclasses.dataclass(frozen=True)
class Sparse(Column):
    """A sparse tensor `[rows, ...]` stored by rows, because TensorFlow's own has no index of the rows.

    Args:
        places: For each row the indices of its values along the other axes, `[rows, (values), rank - 1]`.
        values: For each row its values, `[rows, (values)]`.
        shape: The shape of the whole tensor.
    """

    places: tf.RaggedTensor
    values: tf.RaggedTensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: tf.SparseTensor) -> Sparse:
        """Convert a sparse tensor of known shape."""
        tensor = tf.sparse.reorder(tensor)
        numbers = tensor.indices[:, 0]
        places, values = (
            tf.RaggedTensor.from_value_rowids(part, numbers, nrows=tensor.dense_shape[0])
            for part in (tensor.indices[:, 1:], tensor.values)
        )
        return cls(places, values, tuple(tensor.dense_shape.numpy().tolist()))

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return self.shape[0]

    def between(self, first: Any, size: int) -> tf.SparseTensor:
        """Return the rows `first .. first + size - 1`, `[size, ...]`."""
        return self._joined(self.places[first : first + size], self.values[first : first + size], size)

    def at(self, rows: tf.Tensor, size: int) -> tf.SparseTensor:
        """Return the rows with the numbers `rows`, `[size, ...]`."""
        return self._joined(tf.gather(self.places, rows), tf.gather(self.values, rows), size)

    def _joined(self, places: tf.RaggedTensor, values: tf.RaggedTensor, size: int) -> tf.SparseTensor:
        indices = tf.concat([places.value_rowids()[:, tf.newaxis], places.values], axis=1)
        return tf.SparseTensor(indices, values.values, [size, *self.shape[1:]])


def column(name: str, value: Any) -> Column:
    """Convert an array to a column, with floats in Keras' float type, as `keras.Model.fit` does.

    Args:
        name: The name of the array in errors.
        value: A NumPy array, a tensor of TensorFlow, jax or torch, a ragged or sparse tensor, a scipy sparse matrix, a
            pandas DataFrame or Series (a column `[rows, 1]`), or anything that NumPy converts, such as Arrow arrays.

    Raises:
        TypeError: If it is not an array, or an array of Python objects.
        ValueError: If it is a single value.

    >>> column("x", np.arange(6.0)).between(2, 3).numpy().tolist()
    [2.0, 3.0, 4.0]
    """
    if isinstance(value, Column):
        return value
    if keras_data_adapters.is_scipy_sparse(value):
        value = keras_data_adapters.to_tensorflow(value.tocsr())
    if isinstance(value, tf.SparseTensor):
        return Sparse.of(_in_floatx(value))
    if isinstance(value, tf.RaggedTensor):
        return Ragged(_in_floatx(value))
    if keras_data_adapters.is_pandas(value):
        value = keras_data_adapters.pandas_values(value)
    if np.isscalar(value) or not keras_data_adapters.is_array(value):
        raise TypeError(
            f"{name} must be an array such as numpy.ndarray or tf.Tensor, but is {value!r:.60} of type "
            f"{type(value).__name__}. {_way_out(value)}"
        )
    return Dense(_dense(name, value))


def _way_out(value: Any) -> str:
    if inspect.isgeneratorfunction(value):
        return f"Call it: {value.__name__}() is a generator of batches."
    if isinstance(value, Iterator):
        return "Make it a generator of batches, (batch for batch in batches), or pass a tf.data.Dataset."
    return "Convert it with numpy.asarray, or pass a tf.data.Dataset."


def _dense(name: str, value: Any) -> tf.Tensor:
    if not tf.is_tensor(value):
        value = np.asarray(keras_data_adapters.to_tensorflow(value))
        if value.dtype == np.dtype(object) and not all(isinstance(item, (str, bytes)) for item in value.flat):
            raise TypeError(f"{name} must hold numbers or strings of one type, but its dtype is object.")
        if value.dtype.kind == "f":
            value = value.astype(keras.config.floatx(), copy=False)
    tensor = _in_floatx(tf.convert_to_tensor(value))
    if tensor.shape.rank == 0:
        raise ValueError(f"{name} must have a first axis over the examples, but is the single value {value!r:.60}.")
    return tensor


def _in_floatx(tensor: Any) -> Any:
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor
