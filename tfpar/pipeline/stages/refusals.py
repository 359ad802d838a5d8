"""Errors for layers that a stage does not support, raised when the stage is traced.

In a stage, the values of weights are tensors, and gradients are computed with respect to them. A function with a custom
gradient must take the weights that it reads as arguments:

    kernel ──────────────┐                          kernel ──┐
                         ▼                                   ▼
    inputs ──► f: matmul(inputs, kernel) ──►        inputs ──► f: matmul(inputs, kernel) ──►
    reads the kernel: no gradient reaches it        takes it: its gradient is the second of f

TensorFlow passes the variables that such a function reads to its gradient function, but not the tensors: their
gradients would silently be missing. `tf.recompute_grad` and `keras.remat` return such functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs import tf_custom_gradient, tf_graph
from tfpar.pipeline.partition.stages import Stage
from tfpar.reduction.gradients.gradient_addition import dense_parts, reached_from

_GRADIENT = "_gradient_op_type"


def refuse_python(graph: Any, devices: Sequence[str], caller: str) -> None:
    """Refuse Python functions in a graph that runs on a worker other than the chief.

    TensorFlow would look for the function in the other process, and report a lost worker.

    Args:
        graph: The graph of a concrete function.
        devices: The devices on which it runs.
        caller: The subject of the error message.

    Raises:
        ValueError: If such a graph calls a Python function.

    Example:
        >>> graph = tf.function(lambda x: tf.numpy_function(abs, [x], "float32")).get_concrete_function(1.0).graph
        >>> refuse_python(graph, ["/job:worker/replica:0/task:0/device:CPU:0"], "dense")
        >>> refuse_python(graph, ["/job:worker/replica:0/task:1/device:CPU:0"], "dense")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: dense calls a Python function, ..., and is on worker 1: ...
    """
    workers = {tf.DeviceSpec.from_string(device).task for device in devices} - {None, 0}
    if workers and tf_graph.calls_python(graph):
        raise ValueError(
            f"{caller} calls a Python function, as with tf.numpy_function or tf.py_function, and is on worker "
            f"{min(workers)}: only the process that runs the steps has the function. Compute it with operations of "
            "TensorFlow or Keras, or choose a strategy whose workers run steps of their own, such as MultiWorker()."
        )


def refuse_assigned(parameters: Sequence[Any], new_values: Sequence[tf.Tensor | None]) -> None:
    """Refuse a layer that assigns a trained weight.

    Args:
        parameters: The trained weights.
        new_values: The value of each weight after the forward pass; None if unchanged.

    Raises:
        ValueError: If a weight has changed.
    """
    for variable, new in zip(parameters, new_values, strict=True):
        if new is not None:
            raise ValueError(
                f"In stages and shards, only the optimizer can change a trained weight, received a layer that assigns "
                f"{variable.path!r} in its call (as SpectralNormalization does). Leave that layer out, or train on "
                "SingleDevice()."
            )


def refuse_hidden_reads(graph: Any, parameters: Sequence[Any], trained: Sequence[tf.Tensor], inputs: Any) -> None:
    """Refuse a function with a custom gradient that reads weights or activations without taking them as arguments.

    Args:
        graph: The graph of a forward pass.
        parameters: The trained weights.
        trained: Their values, tensors of the graph.
        inputs: The inputs of the stage that have a gradient.

    Raises:
        ValueError: If there is such a function.
    """
    for index in hidden_reads(graph, [*trained, *inputs]):
        name = repr(parameters[index].path) if index < len(trained) else "the output of an earlier layer"
        raise ValueError(
            "In stages and shards, a function with a custom gradient must take the weights and activations that it "
            f"reads as arguments, received one that reads {name}. Make it an argument; in place of tf.recompute_grad "
            "and keras.remat, use recompute=True of a pipeline. Or train on SingleDevice() or Mirrored()."
        )


def hidden_reads(graph: Any, tensors: Sequence[tf.Tensor]) -> list[int]:
    """Return the indices of the tensors that functions with a custom gradient read, but do not take as arguments.

    Functions inside loops and conditionals are not checked.

    Args:
        graph: The graph of a forward pass.
        tensors: Tensors of the graph, such as the values of weights.

    Example:
        >>> @tf.custom_gradient
        ... def doubled(inputs):
        ...     return inputs * kernel, lambda upstream: upstream * kernel
        >>> with tf.Graph().as_default() as graph:
        ...     kernel, inputs = tf.compat.v1.placeholder("float32"), tf.compat.v1.placeholder("float32")
        ...     output = doubled(inputs)
        >>> hidden_reads(graph, [inputs, kernel])
        [1]
    """
    read: set[Any] = set()
    for op in graph.get_operations():
        if op.type == "IdentityN" and _GRADIENT in (attributes := op.node_def.attr):
            num_results = tf_custom_gradient.num_results(attributes[_GRADIENT].s.decode())
            read |= _needed(op.inputs[:num_results], stop=op.inputs[num_results:])
    return [index for index, tensor in enumerate(tensors) if tensor.ref() in read]


def _needed(results: Iterable[tf.Tensor], stop: Iterable[tf.Tensor]) -> set[Any]:
    """Return the `ref()` of the tensors that results depend on, up to and without `stop`."""
    needed, ends, waiting = set(), {tensor.ref() for tensor in stop}, list(results)
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() not in needed and tensor.ref() not in ends:
            needed.add(tensor.ref())
            waiting += tensor.op.inputs
    return needed


def refuse_mixed_losses(
    stage: Stage,
    whole_losses: Sequence[tf.Tensor],
    outputs: Sequence[Any],
    losses: Sequence[tf.Tensor],
    values: Sequence[Any],
) -> None:
    """Refuse results that depend both on a loss of the whole batch and on the examples of a micro-batch.

    Args:
        stage: The stage.
        whole_losses: Losses of the whole batch, computed by layers of the stage.
        outputs: The outputs of the stage.
        losses: The losses that its layers add.
        values: The inputs of the stage.

    Raises:
        ValueError: If there is such a result.
    """
    if not whole_losses:
        return
    later = reached_from(whole_losses)
    if any(part.op in later for part in dense_parts(outputs)):
        raise ValueError(
            "In stages, a loss computed in call() must be used in the same stage if it has trained weights or is "
            f"transformed by more than a constant factor, but stage {stage.index} sends it to a later stage. Change "
            "the cuts with balance, or train on SingleDevice() or Mirrored()."
        )
    gradients = tf.gradients(list(losses), list(whole_losses)) if losses else []
    varying = reached_from(values, stop=[loss.op for loss in whole_losses])
    for gradient in gradients:
        if gradient is not None and gradient.op in varying:
            raise ValueError(
                "In stages and shards, a layer can add the value of a loss object, or a function of it, but not its "
                f"product with another value of the examples, as in stage {stage.index}. Add each as a separate loss, "
                "or train on SingleDevice() or Mirrored()."
            )
