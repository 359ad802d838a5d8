"""Input of trial runs of a model: a few different examples, and moving statistics in BatchNormalization."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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


def first_examples(batch: Any) -> Any:
    """Return the first examples of a batch, at most four.

    Args:
        batch: Tensors in any structure, `[batch, ...]` each.

    Example:
        >>> first_examples(tf.range(8)).numpy()
        array([0, 1, 2, 3], dtype=int32)
    """
    return data.take_rows(batch, 0, min(NUM_EXAMPLES, int(data.num_rows(batch))))


class Examples:
    """The first examples of batches, one for each structure of a batch, for trial runs of steps.

    Example:
        >>> examples = Examples()
        >>> examples.keep(tf.range(8.0))
        >>> examples.like(tf.zeros([5])).numpy()  # of a batch of the same kind
        array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(self) -> None:
        self._examples: dict[str, Any] = {}

    def keep(self, batch: Any) -> None:
        """Store the first examples of a batch, and replace those of the last batch of the same structure.

        Args:
            batch: Tensors in any structure, `[batch, ...]` each.
        """
        self._examples[_structure(batch)] = first_examples(batch)

    def like(self, batch: Any) -> Any:
        """Return the stored examples for the structure of a batch; the batch's own if there are none.

        Args:
            batch: Tensors in any structure. They may be symbolic if examples are stored.
        """
        if _structure(batch) not in self._examples:
            self.keep(batch)
        return tf.nest.pack_sequence_as(batch, tf.nest.flatten(self._examples[_structure(batch)]))


def pairs_of_parts(batch: Any) -> list[tuple[Any, Any]]:
    """Return pairs of parts of a batch of equal size: the first and the second part, and each part twice.

    Args:
        batch: Tensors in any structure, `[examples, ...]` each.

    Example:
        >>> [(one.numpy().tolist(), other.numpy().tolist()) for one, other in pairs_of_parts(tf.range(4))]
        [([0, 1], [2, 3]), ([0, 1], [0, 1]), ([2, 3], [2, 3])]
    """
    size = min(NUM_EXAMPLES, int(data.num_rows(batch)))
    half = max(1, size // 2)
    one = data.take_rows(batch, 0, half)
    other = data.take_rows(batch, half, 2 * half) if size > 1 else one
    return [(one, other), (one, one), (other, other)]


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


def _structure(batch: Any) -> str:
    """Return the structure of a batch; a named tuple has that of a tuple, which replaces it in steps."""
    if isinstance(batch, Mapping):
        return str({key: _structure(batch[key]) for key in sorted(batch)})
    if isinstance(batch, tuple | list):
        return str([_structure(part) for part in batch])
    return str(batch is not None)


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
