"""Sums of several tensors in a fixed order.

TensorFlow 2.21's `AddN` accumulates into the first input whose buffer is free (`AddNOp::Compute` in
tensorflow/core/kernels/aggregate_ops.cc). With three inputs or more, the order, and so the rounding, depends on which
consumers of the inputs have finished:

    a + b + c    if a or b is free    c + b + a    if device 1 still reads both

In 3,000 runs with three tensors, two of them read by another device, each order occurred about half of the time. The
gradient of a tensor with three consumers is such a sum. The graph optimizer also merges binary sums into `AddN` unless
they are marked (`AddOpsRewriteStage` in tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import gen_math_ops

from tfpar._compat import versions

_MARK = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"
_lock = threading.Lock()
_num_active = 0


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Trace `tf.add_n` and gradient sums in the order of their inputs, in all threads."""
    global _num_active
    with _lock:
        _num_active += 1
        _replace_once()
    try:
        yield
    finally:
        with _lock:
            _num_active -= 1


@functools.cache
def _replace_once() -> None:
    original = versions.private(gen_math_ops, "add_n")

    @functools.wraps(original)
    def add_n(inputs: Any, name: str | None = None) -> Any:
        if not _num_active or tf.executing_eagerly() or len(inputs) < 2 or not _are_numbers(inputs):
            return original(inputs, name)
        shape = tf.TensorShape(None)
        for tensor in inputs:
            if not shape.is_compatible_with(tensor.shape):
                return original(inputs, name)  # raises an error, where binary sums would broadcast
            shape = shape.merge_with(tensor.shape)
        if len(inputs) == 2:  # the order does not matter
            return _marked(original(inputs, name))
        total = functools.reduce(lambda first, second: _marked(tf.raw_ops.AddV2(x=first, y=second)), inputs)
        total.set_shape(shape)
        return total

    versions.replace(gen_math_ops, "add_n", add_n)


def _are_numbers(inputs: Any) -> bool:
    return all(isinstance(tensor, tf.Tensor) and tensor.dtype != tf.variant for tensor in inputs)


def _marked(total: tf.Tensor) -> tf.Tensor:
    total.op._set_attr(_MARK, attr_value_pb2.AttrValue(b=True))
    return total
