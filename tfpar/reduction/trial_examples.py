"""Examples for trials of losses and metrics: targets of a batch, and made-up outputs that differ for each example.

    outputs at the first weights   0.50 0.50 0.50 0.50   a root of the mean loss is a mean over the batch
    made-up outputs                0.07 0.81 0.44 0.93   and here it is not

A model with new weights returns almost the same for every example. On such outputs many losses are means over the batch
that are none later. The targets change too: the batch may have no padding, no ignored label (-1, -100, 255), no
missing number (NaN), or no positive.
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

NUM_EXAMPLES = 8
SIZES = (1, 2, 5)  # of the parts

_MOST_VALUES = 1 << 28  # of all outputs; larger ones take too much memory
_FEW_VALUES = 1 << 24  # of outputs that are tried in more ways, in a fraction of a second each
_MOST_TIMES = 8
_NUM_DRAWN = 1_048_573  # a prime, so that no two examples have the same of the numbers, which repeat
_Change = Callable[[tf.Tensor, np.random.Generator], tf.Tensor]


class Examples(NamedTuple):
    """Examples with outputs of a model.

    Args:
        inputs: The inputs of the model, `[examples, ...]` each.
        targets: Its targets.
        weights: The sample weights.
        outputs: Its outputs.
        times: How many times `NUM_EXAMPLES` there are.
        is_given: Whether the targets are those of the batch.
    """

    inputs: Any
    targets: Any
    weights: Any
    outputs: Any
    times: int = 1
    is_given: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each part."""
        return tuple(size * self.times for size in SIZES)

    def parts(self) -> list[Examples]:
        """Return parts of different sizes, in order."""
        ends = np.cumsum(self.sizes)
        rows = [
            data.take_rows((self.inputs, self.targets, self.weights, self.outputs), end - size, end)
            for size, end in zip(self.sizes, ends.tolist(), strict=True)
        ]
        return [Examples(*part, *self[len(part) :]) for part in rows]


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
    num_values = sum(NUM_EXAMPLES * math.prod(leaf.shape[1:]) for leaf in leaves)
    if num_values > _MOST_VALUES:
        return
    # As many as the batch has: a mean of the k largest losses is one over the batch where that has at most k.
    times = min(_MOST_TIMES, int(data.num_rows(batch)) // NUM_EXAMPLES, _FEW_VALUES // max(1, num_values))
    changes: list[tuple[_Change, _Change, int]] = [
        (_same, _shares, 1),
        (_same, _signed, 1),
        (functools.partial(_ended, markers=(0, 0.0)), _shares, 1),
        (_binary, _shares, 1),
        (functools.partial(_ended, markers=(-100, math.nan)), _shares, 1),
    ]
    if num_values <= _FEW_VALUES:
        changes += [(functools.partial(_ended, markers=one), _shares, 1) for one in ((-1, -1.0), (255, None))]
    if times > 1:
        changes.append((_same, _shares, times))
    for seed, (of_targets, of_outputs, times) in enumerate(changes):
        random, rows = np.random.default_rng(seed), _first_rows(outputs, times)
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(_first_rows(batch, times))
        changed = _changed(of_targets, targets, random), weights, _changed(of_outputs, rows, random)
        yield Examples(inputs, *changed, times, is_given=of_targets is _same)


def _first_rows(batch: Any, times: int) -> Any:
    """Return the first examples of a batch, and these again if they are too few."""
    wanted = times * NUM_EXAMPLES
    num_rows = min(int(data.num_rows(batch)), wanted)
    rows = data.take_rows(batch, 0, num_rows)
    return data.take_rows(data.join_batches([rows] * -(-wanted // num_rows)), 0, wanted)


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


def _ended(leaf: tf.Tensor, random: np.random.Generator, markers: tuple[int, float | None]) -> tf.Tensor:
    """Return targets of which each example ends, in markers, at another position of the next axis, or is a marker.

    Args:
        leaf: Targets of `NUM_EXAMPLES` examples.
        random: Not used.
        markers: The marker of integers and that of other numbers, such as -100 and NaN; None for none.
    """
    marker = markers[1] if leaf.dtype.is_floating else markers[0]
    if marker is None or (marker and not leaf.dtype.is_floating and not _holds(leaf.dtype, int(marker))):
        return leaf
    length = 1 if leaf.shape.rank == 1 else int(leaf.shape[1])
    ends = (
        np.where(np.arange(NUM_EXAMPLES) % 2, 0, length)
        if length == 1
        else np.arange(NUM_EXAMPLES) * length // NUM_EXAMPLES + 1
    )
    kept = np.arange(length) < ends[:, None]
    shape = [NUM_EXAMPLES, length][: leaf.shape.rank] + [1] * (leaf.shape.rank - 2)
    return tf.where(kept.reshape(shape), leaf, tf.cast(marker, leaf.dtype))


def _holds(dtype: tf.DType, marker: int) -> bool:
    return bool(dtype.is_integer and dtype.min <= marker <= dtype.max)


def _binary(leaf: tf.Tensor, random: np.random.Generator) -> tf.Tensor:
    """Return random zeros and ones for targets that have only these."""
    if not bool(tf.reduce_all((leaf == tf.zeros_like(leaf)) | (leaf == tf.ones_like(leaf)))):
        return leaf
    return tf.cast(random.uniform(size=leaf.shape) < 0.5, leaf.dtype)
