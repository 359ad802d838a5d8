"""Examples for trials of losses and metrics: targets of a batch, and made-up outputs that differ for each example.

    outputs at the first weights   0.50 0.50 0.50 0.50   a root of the mean loss is a mean over the batch
    made-up outputs                0.07 0.81 0.44 0.93   and here it is not

A model with new weights returns almost the same for every example. On such outputs many losses are means over the batch
that are none later. The targets change too: the first examples may have no padding, or no positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar import data

NUM_EXAMPLES = 8
SIZES = (1, 2, 5)  # of the parts

_MOST_VALUES = 1 << 28  # of all outputs; larger ones take too much memory
_NUM_DRAWN = 1_048_573  # a prime, so that no two examples have the same of the numbers, which repeat
_Change = Callable[[tf.Tensor, np.random.Generator], tf.Tensor]


class Examples(NamedTuple):
    """Examples with outputs of a model.

    Args:
        inputs: The inputs of the model, `[examples, ...]` each.
        targets: Its targets.
        weights: The sample weights.
        outputs: Its outputs.
    """

    inputs: Any
    targets: Any
    weights: Any
    outputs: Any

    def parts(self) -> list[Examples]:
        """Return parts of different sizes, in order."""
        ends = np.cumsum(SIZES)
        return [
            Examples(*data.take_rows(tuple(self), end - size, end))
            for size, end in zip(SIZES, ends.tolist(), strict=True)
        ]


def made_up(batch: Any, outputs: Any) -> Iterator[Examples]:
    """Yield examples with several outputs and targets; none where an output is ragged, sparse or very large.

    Args:
        batch: Some examples, `(inputs, targets, sample_weight)` as far as given, at least one.
        outputs: Outputs of the model for some examples, of which only types and shapes count.

    Example:
        >>> batch = tf.zeros([4, 3]), tf.constant([1, 0, 0, 1])
        >>> [examples.targets.numpy().tolist() for examples in made_up(batch, tf.zeros([4, 2]))][2]
        [1, 0, 0, 0, 1, 0, 0, 0]
    """
    leaves = tf.nest.flatten(outputs)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
        return
    if sum(NUM_EXAMPLES * math.prod(leaf.shape[1:]) for leaf in leaves) > _MOST_VALUES:
        return
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(_first_rows(batch))
    changes: list[tuple[_Change, _Change]] = [(_same, _shares), (_same, _signed), (_ended, _shares), (_binary, _shares)]
    rows = _first_rows(outputs)
    for seed, (of_targets, of_outputs) in enumerate(changes):
        random = np.random.default_rng(seed)
        yield Examples(inputs, _changed(of_targets, targets, random), weights, _changed(of_outputs, rows, random))


def _first_rows(batch: Any) -> Any:
    """Return the first examples of a batch, and these again if they are too few."""
    num_rows = min(int(data.num_rows(batch)), NUM_EXAMPLES)
    rows = data.take_rows(batch, 0, num_rows)
    return data.take_rows(data.join_batches([rows] * -(-NUM_EXAMPLES // num_rows)), 0, NUM_EXAMPLES)


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


def _ended(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Return targets of which each example ends, in zeros, at another position of the next axis, or is zero."""
    length = 1 if leaf.shape.rank == 1 else int(leaf.shape[1])
    ends = (
        np.where(np.arange(NUM_EXAMPLES) % 2, 0, length)
        if length == 1
        else np.arange(NUM_EXAMPLES) * length // NUM_EXAMPLES + 1
    )
    kept = np.arange(length) < ends[:, None]
    shape = [NUM_EXAMPLES, length][: leaf.shape.rank] + [1] * (leaf.shape.rank - 2)
    return tf.where(kept.reshape(shape), leaf, tf.zeros_like(leaf))


def _binary(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Return random zeros and ones for targets that have only these."""
    if not bool(tf.reduce_all((leaf == tf.zeros_like(leaf)) | (leaf == tf.ones_like(leaf)))):
        return leaf
    return tf.cast(random.uniform(size=leaf.shape) < 0.5, leaf.dtype)
