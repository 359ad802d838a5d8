"""Update weights by sparse gradients, for which Keras computes on tensors as large as the weight.

As in Keras, duplicate rows are squared separately: a velocity takes the sum of their squares, not the square of their
sum. Each function takes an operation for dense gradients and a sparse gradient, and returns the operation to run
instead and the tensor to pass to it as `grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Run = Callable[..., Any]
ByRows = Callable[[Run, tf.IndexedSlices, tf.TensorShape], tuple[Run, tf.Tensor]]


def summed(run: Run, gradient: tf.IndexedSlices, shape: tf.TensorShape) -> tuple[Run, tf.Tensor]:
    """Sum duplicate rows, for an optimizer without squares."""
    return run, tf.convert_to_tensor(gradient)


def adam(run: Run, gradient: tf.IndexedSlices, shape: tf.TensorShape, beta_1: float) -> tuple[Run, tf.Tensor]:
    """Pass the roots of the summed squares to Adam's operation, and correct the momentum by the sums.

    Args:
        run: The operation.
        gradient: The sparse gradient, in the dtype of the weight.
        shape: The shape of the weight.
        beta_1: Adam's `beta_1`, not 0.
    """
    indices, numbers = tf.unique(gradient.indices)
    rows = gradient.values, gradient.values**2
    sums, squares = (tf.math.unsorted_segment_sum(values, numbers, tf.size(indices)) for values in rows)

    def dense(rows: tf.Tensor) -> tf.Tensor:
        return tf.scatter_nd(indices[:, tf.newaxis], rows, tf.constant(shape.as_list(), indices.dtype))

    def run_by_rows(*, m: tf.Tensor, grad: tf.Tensor, **inputs: Any) -> None:
        own_sums, roots = tf.unstack(grad)
        missing = (own_sums - roots) * ((1 - beta_1) / beta_1)  # the operation multiplies it by beta_1
        # Not ResourceScatterAdd, after which all other operations copy the variable.
        tf.raw_ops.AssignAddVariableOp(resource=m, value=dense(missing))
        run(m=m, grad=dense(roots), **inputs)

    return run_by_rows, tf.stack([sums, tf.sqrt(squares)])


def adagrad(run: Run, gradient: tf.IndexedSlices, shape: tf.TensorShape, epsilon: float) -> tuple[Run, tf.Tensor]:
    """Update the rows as Keras' Adagrad does, if it divides no other row by 0."""

    def run_by_rows(var: tf.Tensor, accum: tf.Tensor, lr: tf.Tensor, grad: tf.Tensor) -> None:
        tf.raw_ops.ResourceScatterAdd(resource=accum, indices=gradient.indices, updates=grad**2)
        squares = tf.raw_ops.ResourceGather(resource=accum, indices=gradient.indices, dtype=grad.dtype)
        change = lr * grad / tf.sqrt(squares + epsilon)
        tf.raw_ops.ResourceScatterSub(resource=var, indices=gradient.indices, updates=change)

    return run_by_rows, gradient.values


def rmsprop(run: Run, gradient: tf.IndexedSlices, shape: tf.TensorShape, rho: float) -> tuple[Run, tf.Tensor]:
    """Update the rows as Keras' RMSprop without momentum does."""

    def run_by_rows(
        var: tf.Tensor, ms: tf.Tensor, lr: tf.Tensor, grad: tf.Tensor, epsilon: tf.Tensor, **_: Any
    ) -> None:
        decayed = rho * tf.raw_ops.ReadVariableOp(resource=ms, dtype=grad.dtype)
        tf.raw_ops.AssignVariableOp(resource=ms, value=decayed)
        tf.raw_ops.ResourceScatterAdd(resource=ms, indices=gradient.indices, updates=(1 - rho) * grad**2)
        squares = tf.raw_ops.ResourceGather(resource=ms, indices=gradient.indices, dtype=grad.dtype)
        change = lr * grad / tf.sqrt(squares + epsilon)
        tf.raw_ops.ResourceScatterSub(resource=var, indices=gradient.indices, updates=change)

    return run_by_rows, gradient.values
