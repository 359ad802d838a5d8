"""Probabilities and the logits from which Keras computes their cross-entropy.

Written for Keras 3.15: `keras.activations.softmax` and `sigmoid` note the logits on the probabilities
(keras/src/activations/activations.py), and the cross-entropy of such probabilities is that of the logits
(`_get_logits` in keras/src/backend/tensorflow/nn.py). An argument of another function has no such note, and Keras would
clip probabilities near 0 and 1. So the logits are sent in place of the probabilities, which are recomputed there.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

_ACTIVATIONS = {"Softmax": keras.activations.softmax, "Sigmoid": keras.activations.sigmoid}


def sent_as(tensor: Any) -> tuple[Any, str]:
    """Return the logits of probabilities and their activation; any other tensor, and an empty text.

    Args:
        tensor: A tensor of a graph, perhaps a ragged or sparse one.
    """
    logits = getattr(tensor, "_keras_logits", None)
    if not isinstance(logits, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
        return tensor, ""
    op = tensor.op
    while op.type == "Identity":  # a stage may send on what it received
        op = op.inputs[0].op
    is_known = op.type in _ACTIVATIONS and op.inputs[0].name == logits.name
    return (logits, str(op.type)) if is_known else (tensor, "")


def received_as(tensor: Any, activation: str) -> Any:
    """Return the tensor that `sent_as` was given, from what it returned.

    Args:
        tensor: Logits, or any other tensor.
        activation: The activation; an empty text for none.
    """
    return _ACTIVATIONS[activation](tensor) if activation else tensor
