"""Transfer of probabilities between functions as logits, from which Keras computes the cross-entropy.

In Keras 3.15, `keras.activations.softmax` and `sigmoid` attach the logits to the probabilities
(keras/src/activations/activations.py), and the cross-entropy uses them (`_get_logits` in
keras/src/backend/tensorflow/nn.py). A tensor passed to another function loses them, and Keras would clip probabilities
near 0 and 1. So the logits are sent, and the receiver recomputes the probabilities.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

_ACTIVATIONS = {"Softmax": keras.activations.softmax, "Sigmoid": keras.activations.sigmoid}


def sent_as(tensor: Any) -> tuple[Any, str]:
    """Return the logits and the activation of probabilities, or any other tensor and an empty text.

    Args:
        tensor: A tensor of a graph, possibly ragged or sparse.
    """
    logits = getattr(tensor, "_keras_logits", None)
    if not isinstance(logits, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
        return tensor, ""
    op = tensor.op
    while op.type == "Identity":  # a stage may forward what it received
        op = op.inputs[0].op
    is_known = op.type in _ACTIVATIONS and op.inputs[0].name == logits.name
    return (logits, str(op.type)) if is_known else (tensor, "")


def received_as(tensor: Any, activation: str) -> Any:
    """Invert `sent_as`."""
    return _ACTIVATIONS[activation](tensor) if activation else tensor
