"""Rows for the study of losses and metrics: those of the batch, and synthetic ones that differ from each other.

    outputs at the first weights   0.50 0.50 0.50 0.50   the root of the mean loss looks like a mean over the batch
    synthetic outputs              0.07 0.81 0.44 0.93   here it does not

A new model returns almost the same for every row, where many losses look like means over the batch. The targets are
varied too, because the batch may have no padding, no ignored label, no missing number or no positive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar.study.rows import SIZES as FEW

# Sizes of the parts of synthetic rows: so many that the eight largest losses are not those of all rows.
MANY = (1, 4, 11)
_MOST_VALUES = 1 << 24  # of the outputs for MANY rows; larger outputs get FEW rows
_NUM_DRAWN = 1_048_573  # random numbers, which repeat; a prime, so that no two rows are equal
_Change = Callable[[tf.Tensor, np.random.Generator], tf.Tensor]


class Rows(NamedTuple):
    """Rows of a batch with outputs of a model.

    Args:
        inputs: The inputs of the model, `[rows, ...]` each.
        targets: The targets.
        weights: The sample weights.
        outputs: The outputs of the model, with their Keras masks.
        sizes: The number of rows in each part.
        is_real: Whether these are rows of the batch, not synthetic ones.
    """

    inputs: Any
    targets: Any
    weights: Any
    outputs: Any
    sizes: tuple[int, ...] = FEW
    is_real: bool = True

    def parts(self) -> list[Rows]:
        """Split the rows into parts of `sizes`, in order."""
        ends = np.cumsum(self.sizes).tolist()
        bounds = zip(self.sizes, ends, strict=True)
        rows = [data.take_rows(tuple(self[:4]), end - size, end) for size, end in bounds]
        return [self._replace(inputs=x, targets=y, weights=w, outputs=z) for x, y, w, z in rows]

    def rolled(self, number: int) -> Rows:
        """Rotate the rows, so that row `number` comes first."""
        if not number:
            return self
        size, rows = sum(self.sizes), tuple(self[:4])
        parts = [data.take_rows(rows, number, size), data.take_rows(rows, 0, number)]
        inputs, targets, weights, outputs = data.join_batches(parts)
        return self._replace(inputs=inputs, targets=targets, weights=weights, outputs=outputs)

    @property
    def share(self) -> float:
        """The fraction of the rows of all parts that these are."""
        return int(data.num_rows(self.outputs)) / sum(self.sizes)


def synthetic_rows(batch: Any, outputs: Any) -> Iterator[Rows]:
    """Yield rows with synthetic outputs and targets; nothing if an output is ragged or sparse.

    Args:
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        outputs: Outputs of the model for some rows, for their dtypes and shapes.

    Example:
        >>> batch = tf.zeros([4, 3]), tf.constant([1, 0, 0, 1])
        >>> [rows.targets.numpy()[:8].tolist() for rows in synthetic_rows(batch, tf.zeros([4, 2]))][2]
        [1, 0, 0, 0, 1, 0, 0, 0]
    """
    leaves = [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
        return
    num_values = sum(MANY) * sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    sizes = MANY if num_values <= _MOST_VALUES else FEW
    changes: list[tuple[_Change, _Change]] = [
        (_same, _shares),
        (_same, _signed),
        (functools.partial(_ended, markers=(0, 0.0)), _shares),
        (_binary, _shares),
        (functools.partial(_ended, markers=(-100, math.nan)), _shares),
    ]
    for seed, (change_targets, change_outputs) in enumerate(changes):
        random = np.random.default_rng(seed)
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(_first_rows(batch, sum(sizes)))
        changed = _changed(change_outputs, _first_rows(outputs, sum(sizes)), random)
        yield Rows(inputs, _changed(change_targets, targets, random), weights, changed, sizes, is_real=False)


def _first_rows(batch: Any, number: int) -> Any:
    """Return the first rows of a batch, repeated if there are too few."""
    rows = data.take_rows(batch, 0, min(int(data.num_rows(batch)), number))
    return data.take_rows(data.join_batches([rows] * -(-number // int(data.num_rows(rows)))), 0, number)


def _changed(change: _Change, structure: Any, random: np.random.Generator) -> Any:
    return tf.nest.map_structure(lambda leaf: change(leaf, random) if _is_numeric(leaf) else leaf, structure)


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


def _same(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    return leaf


def _shares(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Return outputs between 0 and 1, which are valid as probabilities too."""
    return _repeated(leaf, random.uniform(0.02, 0.98, _NUM_DRAWN))


def _signed(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    return _repeated(leaf, random.normal(0.0, 2.0, _NUM_DRAWN))


def _repeated(leaf: tf.Tensor, numbers: np.ndarray) -> tf.Tensor:
    """Fill a floating tensor with numbers, repeated; return other tensors unchanged."""
    dtype = leaf.dtype
    return tf.constant(np.resize(numbers.astype(dtype.as_numpy_dtype), leaf.shape)) if dtype.is_floating else leaf


def _ended(leaf: tf.Tensor, random: np.random.Generator, markers: tuple[int, float]) -> tf.Tensor:
    """Replace the end of each row of targets `[rows, ...]` by a marker, from a different position on.

    Args:
        leaf: Targets; every other one becomes a marker if a row is a single value.
        random: Not used.
        markers: The markers for integer and for floating targets, such as -100 and NaN.
    """
    marker = markers[1] if leaf.dtype.is_floating else markers[0]
    if marker and not leaf.dtype.is_floating and not _holds(leaf.dtype, int(marker)):
        return leaf
    rows, length = int(leaf.shape[0]), 1 if leaf.shape.rank == 1 else int(leaf.shape[1])
    ends = np.arange(rows) % 4 * length // 4 + 1 if length > 1 else np.where(np.arange(rows) % 2, 0, 1)
    kept = np.arange(length) < ends[:, None]
    shape = [rows, length][: leaf.shape.rank] + [1] * (leaf.shape.rank - 2)
    return tf.where(kept.reshape(shape), leaf, tf.cast(marker, leaf.dtype))


def _holds(dtype: tf.DType, marker: int) -> bool:
    return bool(dtype.is_integer and dtype.min <= marker <= dtype.max)


def _binary(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Replace targets that are all 0 or 1 by random zeros and ones."""
    if not bool(tf.reduce_all((leaf == tf.zeros_like(leaf)) | (leaf == tf.ones_like(leaf)))):
        return leaf
    return tf.cast(random.uniform(size=leaf.shape) < 0.5, leaf.dtype)
