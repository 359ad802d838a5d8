"""Rows for the study of losses and metrics: those of a batch, and made-up outputs that differ for each row.

    outputs at the first weights   0.50 0.50 0.50 0.50   a root of the mean loss is a mean over the batch
    made-up outputs                0.07 0.81 0.44 0.93   and here it is not

A model with new weights returns almost the same for every row. On such outputs many losses are means over the batch
that are none later. The targets change too: the batch may have no padding, no ignored label, no missing number, or no
positive.
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

# Of the parts of the made-up rows: enough that the eight largest losses are not those of all rows.
MANY = (1, 4, 11)
_MOST_VALUES = 1 << 24  # of the outputs of many rows; of more values there are few rows
_NUM_DRAWN = 1_048_573  # a prime, so that no two rows have the same of the numbers, which repeat
_Change = Callable[[tf.Tensor, np.random.Generator], tf.Tensor]


class Rows(NamedTuple):
    """Rows of a batch with outputs of a model.

    Args:
        inputs: The inputs of the model, `[rows, ...]` each.
        targets: Its targets.
        weights: The sample weights.
        outputs: Its outputs, with their Keras masks.
        sizes: The number of rows of each part.
        is_given: Whether they are those of the batch.
    """

    inputs: Any
    targets: Any
    weights: Any
    outputs: Any
    sizes: tuple[int, ...] = FEW
    is_given: bool = True

    def parts(self) -> list[Rows]:
        """Return parts of different sizes, in order."""
        ends = np.cumsum(self.sizes).tolist()
        bounds = zip(self.sizes, ends, strict=True)
        rows = [data.take_rows(tuple(self[:4]), end - size, end) for size, end in bounds]
        return [self._replace(inputs=x, targets=y, weights=w, outputs=z) for x, y, w, z in rows]

    def rolled(self, number: int) -> Rows:
        """Return the rows from one on, and then those before it."""
        if not number:
            return self
        size, rows = sum(self.sizes), tuple(self[:4])
        parts = [data.take_rows(rows, number, size), data.take_rows(rows, 0, number)]
        inputs, targets, weights, outputs = data.join_batches(parts)
        return self._replace(inputs=inputs, targets=targets, weights=weights, outputs=outputs)

    @property
    def share(self) -> float:
        """The share of these rows in those of all parts."""
        return int(data.num_rows(self.outputs)) / sum(self.sizes)


def made_up(batch: Any, outputs: Any) -> Iterator[Rows]:
    """Yield rows with several outputs and targets; none where an output is ragged or sparse.

    Args:
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        outputs: Outputs of the model for some rows, of which types and shapes count.

    Example:
        >>> batch = tf.zeros([4, 3]), tf.constant([1, 0, 0, 1])
        >>> [rows.targets.numpy()[:8].tolist() for rows in made_up(batch, tf.zeros([4, 2]))][2]
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
    for seed, (of_targets, of_outputs) in enumerate(changes):
        random = np.random.default_rng(seed)
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(_first_rows(batch, sum(sizes)))
        of_model = _changed(of_outputs, _first_rows(outputs, sum(sizes)), random)
        yield Rows(inputs, _changed(of_targets, targets, random), weights, of_model, sizes, is_given=False)


def _first_rows(batch: Any, wanted: int) -> Any:
    """Return the first rows of a batch, and these again if they are too few."""
    rows = data.take_rows(batch, 0, min(int(data.num_rows(batch)), wanted))
    return data.take_rows(data.join_batches([rows] * -(-wanted // int(data.num_rows(rows)))), 0, wanted)


def _changed(change: _Change, structure: Any, random: np.random.Generator) -> Any:
    return tf.nest.map_structure(lambda leaf: change(leaf, random) if _is_numeric(leaf) else leaf, structure)


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


def _same(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    return leaf


def _shares(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Return outputs between 0 and 1, valid as probabilities and as any other numbers."""
    return _repeated(leaf, random.uniform(0.02, 0.98, _NUM_DRAWN))


def _signed(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    return _repeated(leaf, random.normal(0.0, 2.0, _NUM_DRAWN))


def _repeated(leaf: tf.Tensor, numbers: np.ndarray) -> tf.Tensor:
    """Return a tensor like a floating one that has some numbers, again and again; another as it is."""
    dtype = leaf.dtype
    return tf.constant(np.resize(numbers.astype(dtype.as_numpy_dtype), leaf.shape)) if dtype.is_floating else leaf


def _ended(leaf: tf.Tensor, random: np.random.Generator, markers: tuple[int, float]) -> tf.Tensor:
    """Return targets of which each row ends, in markers, at another position of the next axis, or is a marker.

    Args:
        leaf: Targets, `[rows, ...]`.
        random: Not used.
        markers: The marker of whole numbers and that of other numbers, such as -100 and NaN.
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
    """Return random zeros and ones for targets that have only these."""
    if not bool(tf.reduce_all((leaf == tf.zeros_like(leaf)) | (leaf == tf.ones_like(leaf)))):
        return leaf
    return tf.cast(random.uniform(size=leaf.shape) < 0.5, leaf.dtype)
