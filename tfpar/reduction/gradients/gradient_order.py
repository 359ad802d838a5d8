"""Compute the gradient of a layer's weights before that of its inputs, so that its all-reduce overlaps.

    output gradient of layer 3 ──► gradient of its weights ──► all-reduce
                            └────► gradient of its inputs ──► output gradient of layer 2 …

TensorFlow 2.21's executor continues with the operation that became ready last. On one thread, and in the order of the
launches on a GPU, it would compute all input gradients first and the large weight gradients last: no all-reduce would
overlap with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs import tf_graph

LARGE_BYTES = 64 << 10  # smaller gradients share a message with those of other layers
_SAME_VALUES = ("Identity", "Reshape", "Transpose", "Cast")


def compute_early(gradients: Sequence[Any], loss: tf.Tensor) -> None:
    """Make input gradients wait for the gradients of large weights that use the same output gradient.

    Args:
        gradients: The gradients of the weights, as the tape returned them.
        loss: The scalar loss; the operations created after it are the backward pass.
    """
    if not tf.is_symbolic_tensor(loss):
        return
    is_backward = _after(loss)
    dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
    producers = {_producer(gradient, is_backward) for gradient in dense}
    for producer in dict.fromkeys(_producer(gradient, is_backward) for gradient in dense if _is_large(gradient)):
        inputs = [tensor for tensor in producer.inputs if tensor.dtype.is_floating and is_backward(tensor.op)]
        if len({tensor.ref() for tensor in inputs}) == 1:
            output_gradient = inputs[0]
            # No cycle: the producer depends only on this output gradient and on the forward pass.
            tf_graph.run_before(producer, [op for op in output_gradient.consumers() if op not in producers])


def use_early(message: tf.Tensor, contains: tf.Tensor, output_gradient: tf.Tensor, loss: tf.Tensor) -> None:
    """Make all other uses of an output gradient wait for a message that contains it.

    Args:
        message: The message, computed from `contains` and from the forward pass.
        contains: The result of one operation on the output gradient.
        output_gradient: The gradient of a layer's outputs.
        loss: As for `compute_early`.
    """
    if _after(loss)(output_gradient.op):
        tf_graph.run_before(message.op, [op for op in output_gradient.consumers() if op is not contains.op])


def _after(loss: tf.Tensor) -> Callable[[tf.Operation], bool]:
    """Return a function: whether an operation was created after the loss."""
    operations = loss.graph.get_operations()
    later = set(operations[operations.index(loss.op) + 1 :])
    return later.__contains__


def _is_large(gradient: tf.Tensor) -> bool:
    num_elements = gradient.shape.num_elements()
    return num_elements is not None and num_elements * gradient.dtype.size >= LARGE_BYTES


def _producer(gradient: tf.Tensor, is_backward: Callable[[tf.Operation], bool]) -> tf.Operation:
    """Return the operation that computes a gradient, before its values are reshaped or rounded."""
    op = gradient.op
    while op.type in _SAME_VALUES and is_backward(op.inputs[0].op):
        op = op.inputs[0].op
    return op
