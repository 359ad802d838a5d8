"""Arithmetic on sizes on the host, for steps on GPUs.

Some integer kernels of TensorFlow 2.21 write their results to GPU memory. Where the batch size is unknown in a trace,
Keras computes shapes with them, for example in a Dense layer on sequences:

    Shape (host) ─► Gather (GPU) ─► Prod (GPU) ─► Reshape reads its shape on the host, which waits for the GPU

In a step of a transformer with 12 blocks, the host waited 77 times for the GPU, and each time the GPU then waited for
the host.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.graphs import tf_kernels

_INTEGERS = (tf.int32, tf.int64, tf.bool)
_MAX_ELEMENTS = 64  # more than a shape has


def sizes_on_host(device: str = "") -> contextlib.AbstractContextManager[Any]:
    """Return a context for traces in which the host computes shapes and other small integer tensors.

    Operations on a few integers that request a GPU are moved to the host if all their inputs are in host memory.
    Outside of a trace the context does nothing.

    Args:
        device: The device of operations that request none; "" if unknown.

    Example:
        >>> @tf.function
        ... def flat(features):
        ...     with sizes_on_host(), tf.device("GPU:0"):
        ...         size = tf.reduce_prod(tf.gather(tf.shape(features), [0, 1]))
        ...         return size.op.device, tf.reshape(features, [size]).op.device
        >>> graph = flat.get_concrete_function(tf.TensorSpec([None, 4])).graph
        >>> {op.type: op.device for op in graph.get_operations() if op.type in ("Prod", "Reshape")}
        {'Prod': '/device:CPU:0', 'Reshape': '/device:GPU:0'}
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()

    graph = tf.compat.v1.get_default_graph()

    def choose_device(op: tf.Operation) -> str:  # called after inner scopes have set the device
        requested = str(op.device)
        own = requested or device
        # Bodies of loops and other functions in the graph keep the device of their call.
        moves = op.graph is graph and is_gpu(own) and _computes_sizes(op)
        return tf_distribute.host_of(own) if moves else requested

    scope: contextlib.AbstractContextManager[Any] = graph.device(choose_device)
    return scope


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU, by its name."""
    return "GPU" in device.upper()


def _computes_sizes(op: tf.Operation) -> bool:
    """Return whether a GPU would compute a few integers in its memory from integers in host memory."""
    if not op.inputs or op.op_def.is_stateful or not all(map(_is_size, (*op.inputs, *op.outputs))):
        return False
    if any(attribute.HasField("func") for attribute in op.node_def.attr.values()):  # a loop or a conditional
        return False
    if any(is_gpu(control.device) for control in op.control_inputs):  # the host would wait for them
        return False
    return not all(map(_is_result_on_host, op.outputs)) and all(map(_is_on_host, op.inputs))


def _is_size(tensor: tf.Tensor) -> bool:
    num_elements = tensor.shape.num_elements()
    return tensor.dtype in _INTEGERS and num_elements is not None and num_elements <= _MAX_ELEMENTS


def _is_on_host(tensor: tf.Tensor) -> bool:
    device = str(tensor.op.device)
    return (bool(device) and not is_gpu(device)) or _is_result_on_host(tensor)


def _is_result_on_host(tensor: tf.Tensor) -> bool:
    """Return whether an operation on a GPU writes this output to host memory."""
    op = tensor.op
    definition = tf_kernels.op_def(op.type)
    if definition is None:
        return False
    signature = tf_kernels.signature(definition, op.node_def.attr)
    kernel = tf_kernels.gpu_kernel(op.type, signature.types)
    return kernel is None or signature.outputs[tensor.value_index] in kernel.host_arguments
