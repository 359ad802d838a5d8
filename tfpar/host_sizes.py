"""Arithmetic on sizes in the memory of the host, for steps on GPUs.

TensorFlow 2.21 has kernels for integers whose results lie in the memory of a GPU. Where a trace does not know the size
of the batch, Keras computes shapes with some of them, such as those of a Dense layer after an axis of time:

    Shape (host) ─► Gather (GPU) ─► Prod (GPU) ─► Reshape reads its shape on the host, which waits for the GPU

In a step of a transformer of 12 blocks on an H200, the host waited 77 times, and then the GPU for the host.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.graphs import tf_kernels

_INTEGERS = (tf.int32, tf.int64, tf.bool)
_MOST_NUMBERS = 64  # more than a shape has


def sizes_on_host(device: str = "") -> contextlib.AbstractContextManager[Any]:
    """Return a context in whose trace the host computes integers from integers that it has, such as shapes.

    Operations of a few integers that request a GPU, with all their inputs in the memory of the host, request the host
    instead. Outside of a trace the context does nothing.

    Args:
        device: The device of operations that request none; "" for one that is not known.

    Example:
        >>> @tf.function
        ... def flat(features):
        ...     with sizes_on_host(), tf.device("GPU:0"):
        ...         size = tf.reduce_prod(tf.gather(tf.shape(features), [0, 1]))
        ...         return size.op.device, tf.reshape(features, [size]).op.device
        >>> graph = flat.get_concrete_function(tf.TensorSpec([None, 4])).graph
        >>> {one.type: one.device for one in graph.get_operations() if one.type in ("Prod", "Reshape")}
        {'Prod': '/device:CPU:0', 'Reshape': '/device:GPU:0'}
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()

    graph = tf.compat.v1.get_default_graph()

    def device_of(op: tf.Operation) -> str:  # called after the scopes within this one have set the device
        requested = str(op.device)
        own = requested or device
        # Bodies of loops and other functions within the graph keep the device of their call.
        return tf_distribute.host_of(own) if op.graph is graph and is_gpu(own) and _is_of_sizes(op) else requested

    scope: contextlib.AbstractContextManager[Any] = graph.device(device_of)
    return scope


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU, by its name."""
    return "GPU" in device.upper()


def _is_of_sizes(op: tf.Operation) -> bool:
    """Return whether a GPU would compute a few integers in its memory from those of the host."""
    if not op.inputs or op.op_def.is_stateful or not all(map(_is_size, (*op.inputs, *op.outputs))):
        return False
    if any(one.HasField("func") for one in op.node_def.attr.values()):  # a loop, or a condition
        return False
    if any(is_gpu(one.device) for one in op.control_inputs):  # the host would wait for them
        return False
    return not all(map(_is_result_on_host, op.outputs)) and all(map(_is_on_host, op.inputs))


def _is_size(tensor: tf.Tensor) -> bool:
    number = tensor.shape.num_elements()
    return tensor.dtype in _INTEGERS and number is not None and number <= _MOST_NUMBERS


def _is_on_host(tensor: tf.Tensor) -> bool:
    device = str(tensor.op.device)
    return (bool(device) and not is_gpu(device)) or _is_result_on_host(tensor)


def _is_result_on_host(tensor: tf.Tensor) -> bool:
    """Return whether a result of an operation on a GPU lies in the memory of the host."""
    op = tensor.op
    definition = tf_kernels.op_def(op.type)
    if definition is None:
        return False
    signature = tf_kernels.signature(definition, op.node_def.attr)
    kernel = tf_kernels.gpu_kernel(op.type, signature.types)
    return kernel is None or signature.outputs[tensor.value_index] in kernel.host_arguments
