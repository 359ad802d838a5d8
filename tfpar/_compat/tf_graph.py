"""Order, devices and costs of operations of a graph that exist already.

Written for TensorFlow 2.21. `tf.control_dependencies` orders operations only when they are created, and a
`tf.GradientTape` creates those of a backward pass all at once. `auto_control_deps` of TensorFlow uses the same method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.util import deprecation


def run_before(first: tf.Operation, then: Sequence[tf.Operation]) -> None:
    """Run an operation before others of its graph, none of which it may depend on."""
    for op in then:
        op._add_control_inputs([first])


def place_constants(op: tf.Operation, device: str) -> None:
    """Place the floating-point constants among the inputs of an operation that have no device yet.

    TensorFlow 2.21 folds constants between operations of one device alone. A constant elsewhere, on the first device,
    could change the last bit of a result.

    Args:
        op: An operation.
        device: Its device.
    """
    for tensor in op.inputs:
        if tensor.op.type == "Const" and tensor.dtype.is_floating and not tensor.op.device:
            tensor.op._set_device(device)


def computed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors of a graph that are computed even if control dependencies alone need them.

    Grappler of TensorFlow 2.21 makes such an operation one that computes nothing, except with this attribute
    (`tensorflow/core/grappler/grappler_item.cc`).

    Args:
        tensors: Tensors of a graph.
    """
    found = [tf.identity(tensor) for tensor in tensors]
    for tensor in found:
        tensor.op._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))
    return found


def num_float_operations(graph: Any) -> float:
    """Return the floating-point operations of a graph.

    The counter of TensorFlow 2.21 calls a function that warns of its own deprecation (`flops_registry.py`), with advice
    that no caller can follow.

    Args:
        graph: The graph of a concrete function.
    """
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    with mock.patch.object(deprecation, "_PRINT_DEPRECATION_WARNINGS", False):
        return float(tf.compat.v1.profiler.profile(graph, options=options).total_float_ops)
