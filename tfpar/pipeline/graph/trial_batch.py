"""What a trial of a model runs on: a few examples of which none is like another, and no statistics of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfpar import data

NUM_EXAMPLES = 4


def trial_examples(inputs: Sequence[Any]) -> list[Any]:
    """Return two or four examples that differ in their elements, and in their lengths where they are ragged.

    Args:
        inputs: A batch of a model's flat inputs, `[examples, ...]` each, at least one.

    Returns:
        The first examples, changed a little. Of a single example others are made, with its elements in another order.
    """
    size = min(NUM_EXAMPLES, *(int(data.num_rows(tensor)) for tensor in inputs))
    if size == 1:
        inputs, size = [_several(tensor) for tensor in inputs], NUM_EXAMPLES
    return [_varied(data.take_rows(tensor, 0, 2 * (size // 2))) for tensor in inputs]


def first_examples(batch: Any) -> Any:
    """Return the first examples of a batch, four if it has as many."""
    return data.take_rows(batch, 0, min(NUM_EXAMPLES, int(data.num_rows(batch))))


class Examples:
    """The first examples of batches, for trials of steps on batches that have the same tensors.

    Example:
        >>> examples = Examples()
        >>> examples.keep(tf.range(8.0))
        >>> examples.like(tf.zeros([5])).numpy()  # of a batch of the same kind
        array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def keep(self, batch: Any) -> None:
        """Keep the first examples of a batch, `[batch, ...]` each, in the place of those of one like it."""
        self._kept[_structure(batch)] = first_examples(batch)

    def like(self, batch: Any) -> Any:
        """Return the examples that were kept of a batch like this one, which may be symbolic; or else its own."""
        if _structure(batch) not in self._kept:
            self.keep(batch)
        return self._kept[_structure(batch)]


def pairs_of_parts(batch: Any) -> list[tuple[Any, Any]]:
    """Return pairs of equally many examples: the first ones and those after them, and each twice.

    Args:
        batch: A batch, `[examples, ...]` each.
    """
    size = min(NUM_EXAMPLES, int(data.num_rows(batch)))
    half = max(1, size // 2)
    one = data.take_rows(batch, 0, half)
    other = data.take_rows(batch, half, 2 * half) if size > 1 else one
    return [(one, other), (one, one), (other, other)]


@contextlib.contextmanager
def moving_statistics(of_synchronized: bool = False) -> Iterator[None]:
    """Let BatchNormalization take its moving statistics inside this context, also in training.

    Args:
        of_synchronized: Only where it is synchronized, and so sees the whole batch when it runs on replicas.
    """
    call = keras.layers.BatchNormalization.call

    def normalize(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        training = training and of_synchronized and not layer.synchronized
        return call(layer, inputs, training=training, mask=mask)

    with mock.patch.object(keras.layers.BatchNormalization, "call", normalize):
        yield


def _structure(batch: Any) -> str:
    return str(tf.nest.map_structure(lambda tensor: tensor is not None, batch))


def _several(tensor: Any) -> Any:
    """Make four examples of one: words of a text, or elements of a row, stay what they are and change places."""
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return data.join_batches([data.take_rows(tensor, 0, 1)] * NUM_EXAMPLES)
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 1:
        return tf.repeat(tensor[:1], NUM_EXAMPLES)
    return tf.concat([tf.roll(tensor[:1], number, -1) for number in range(NUM_EXAMPLES)], 0)


def _varied(tensor: Any) -> Any:
    """Tell equal examples apart: a batch may begin with several empty ones, or with some of one length."""
    if isinstance(tensor, tf.RaggedTensor):
        # The first is longer than all others: what pads to the longest pads the halves differently.
        longest = int(tf.argmax(tensor.row_lengths()))
        first = tf.concat([tensor[longest : longest + 1]] * 2 + [tensor[:1]], 1)
        tensor = tf.concat([first, tensor[1:]], 0)
        return tensor.with_flat_values(_varied(tensor.flat_values))
    if isinstance(tensor, tf.SparseTensor):
        return tensor.with_values(_varied(tensor.values))
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        return tensor
    # Smaller only: floats may be numbers of tokens, which an Embedding looks up.
    factors = np.random.default_rng(0).uniform(0.8, 1.0, tensor.shape)
    return tensor * tf.cast(factors, tensor.dtype)
