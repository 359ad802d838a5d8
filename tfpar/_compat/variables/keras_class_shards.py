"""Replacements for Keras' backend functions on class scores that are sharded over devices.

Private API of Keras 3.15: `keras.ops`, and the losses and metrics built on it, look up backend functions in their
modules at each call (keras/src/ops/nn.py, keras/src/backend/tensorflow/nn.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from keras.src.backend.tensorflow import core, math, nn, numpy

Function = Callable[..., Any]


def logits_of(output: tf.Tensor, from_logits: bool, is_sparse: bool) -> tuple[tf.Tensor, bool]:
    """Return the tensor from which Keras 3.15 computes the cross-entropy of an output, and whether it holds logits.

    Args:
        output: Logits or probabilities. The output of a softmax activation has its logits as an attribute.
        from_logits: The argument of the loss.
        is_sparse: Whether the labels are class indices.
    """
    name = "sparse_categorical_crossentropy" if is_sparse else "categorical_crossentropy"
    logits: tuple[tf.Tensor, bool] = nn._get_logits(output, from_logits, "Softmax", name)
    return logits


@contextlib.contextmanager
def computed_by(
    sparse: Function, dense: Function, argmax: Function, in_top_k: Function, shape: Function
) -> Iterator[None]:
    """Replace functions of Keras' backend inside this context.

    Each replacement takes the original function and then its arguments.

    Args:
        sparse: Takes (target, output, from_logits, axis); replaces `sparse_categorical_crossentropy`.
        dense: Takes the same; replaces `categorical_crossentropy`.
        argmax: Takes (x, axis, keepdims).
        in_top_k: Takes (targets, predictions, k).
        shape: Takes (x).
    """
    functions: list[tuple[Any, str, Function]] = [
        (nn, "sparse_categorical_crossentropy", sparse),
        (nn, "categorical_crossentropy", dense),
        (numpy, "argmax", argmax),
        (math, "in_top_k", in_top_k),
        (core, "shape", shape),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, function in functions:
            stack.enter_context(mock.patch.object(module, name, _before(function, getattr(module, name))))
        yield


def _before(function: Function, original: Function) -> Function:
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return called
