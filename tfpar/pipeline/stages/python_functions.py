"""Python functions in the graph of a stage: only the process that traced it can call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_graph


def refuse_python(graph: Any, devices: Sequence[str], caller: str) -> None:
    """Refuse Python functions in a graph that runs on a worker other than the chief.

    TensorFlow would look for the function in the other process, and end the step with the error of a lost worker.

    Args:
        graph: The graph of a concrete function.
        devices: The devices on which it runs.
        caller: What calls the functions, the begin of a sentence.

    Raises:
        ValueError: If there are any.

    Example:
        >>> graph = tf.function(lambda one: tf.numpy_function(abs, [one], "float32")).get_concrete_function(1.0).graph
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
