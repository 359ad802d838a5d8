"""Penalties of weights in pieces, each computed on the device of its piece. Written for Keras 3.15."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat import tf_divided_memory

# Sums over the elements of a weight.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def is_sum(regularizer: Any) -> bool:
    """Return whether the penalty of a regularizer is a sum over the elements of a weight."""
    return type(regularizer) in _SUMS


@contextlib.contextmanager
def of_pieces() -> Iterator[None]:
    """Add the penalties of the pieces of divided weights inside this context, where a regularizer is such a sum.

    A Keras 3.15 model applies each regularizer to the whole weight (`_get_regularization_losses` in
    keras/src/layers/layer.py), which no device may have the memory for.
    """

    def losses(layer: Any) -> list[Any]:
        found: list[Any] = original(_WithoutSums(layer))
        for variable in filter(_is_summed, layer.trainable_weights):
            parts = []
            for piece in tf_divided_memory.pieces_of(variable):
                with tf.device(piece.value.device):
                    parts.append(variable.regularizer(piece))
            found.append(tf.add_n(parts))
        return found

    original = keras.Layer._get_regularization_losses
    with mock.patch.object(keras.Layer, "_get_regularization_losses", losses):
        yield


class _WithoutSums:
    """The weights of a layer whose penalties Keras computes."""

    def __init__(self, layer: Any) -> None:
        self.trainable_weights = [one for one in layer.trainable_weights if not _is_summed(one)]


def _is_summed(variable: Any) -> bool:
    return tf_divided_memory.is_divided(variable) and is_sum(variable.regularizer)
