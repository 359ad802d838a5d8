"""Input of trial runs of a model: a few different examples, and moving statistics in BatchNormalization."""

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


def trial_examples(inputs: Sequence[Any], changed: bool = True) -> list[Any]:
    """Return two or four different examples of a batch; ragged ones differ in their lengths too.

    Args:
        inputs: A batch of a model's flat inputs, `[examples, ...]` each, with at least one example.
        changed: Whether their values may change, so that equal examples differ.

    Returns:
        The first examples with small changes, or four permutations of the elements of a single example; without
        changes the first examples, or four times a single one.

    Example:
        >>> [tensor.shape for tensor in trial_examples([tf.ones([8, 3])])]
        [TensorShape([4, 3])]
    """
    size = min(NUM_EXAMPLES, *(int(data.num_rows(tensor)) for tensor in inputs))
    if size == 1:
        several = _permutations if changed else _copies
        inputs, size = [several(tensor) for tensor in inputs], NUM_EXAMPLES
    taken = [data.take_rows(tensor, 0, 2 * (size // 2)) for tensor in inputs]
    return [_varied(tensor) for tensor in taken] if changed else taken


@contextlib.contextmanager
def moving_statistics(of_synchronized: bool = False) -> Iterator[None]:
    """Use the moving statistics of BatchNormalization in a context, also in training.

    Args:
        of_synchronized: Whether to do so in synchronized layers only, which use the whole batch on replicas.

    Example:
        >>> layer = keras.layers.BatchNormalization(epsilon=0.0)
        >>> with moving_statistics():
        ...     layer(tf.constant([[1.0], [3.0]]), training=True).numpy().tolist()
        [[1.0], [3.0]]
    """
    call = keras.layers.BatchNormalization.call

    def normalize(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        training = training and of_synchronized and not layer.synchronized
        return call(layer, inputs, training=training, mask=mask)

    with mock.patch.object(keras.layers.BatchNormalization, "call", normalize):
        yield


def _permutations(tensor: Any) -> Any:
    """Return four permutations of the elements of a single example, such as the words of a text."""
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) or tf.convert_to_tensor(tensor).shape.rank == 1:
        return _copies(tensor)
    tensor = tf.convert_to_tensor(tensor)
    return tf.concat([tf.roll(tensor[:1], number, -1) for number in range(NUM_EXAMPLES)], 0)


def _copies(tensor: Any) -> Any:
    return data.join_batches([data.take_rows(tensor, 0, 1)] * NUM_EXAMPLES)


def _varied(tensor: Any) -> Any:
    """Make equal examples different: the first ones of a batch may all be empty, or of the same length."""
    if isinstance(tensor, tf.RaggedTensor):
        # The first is longer than all others, so that padding to the longest differs between the halves.
        longest = int(tf.argmax(tensor.row_lengths()))
        first = tf.concat([tensor[longest : longest + 1]] * 2 + [tensor[:1]], 1)
        tensor = tf.concat([first, tensor[1:]], 0)
        return tensor.with_flat_values(_varied(tensor.flat_values))
    if isinstance(tensor, tf.SparseTensor):
        return tensor.with_values(_varied(tensor.values))
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        return tensor
    # Only smaller values: floats may be indices of an Embedding.
    factors = np.random.default_rng(0).uniform(0.8, 1.0, tensor.shape)
    return tensor * tf.cast(factors, tensor.dtype)
