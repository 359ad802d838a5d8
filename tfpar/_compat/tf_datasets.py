"""What a `tf.data.Dataset` was made with. Written for TensorFlow 2.21."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import random_op

from tfpar._compat import versions
from tfpar._compat.graphs import tf_graph

_Random = versions.private(random_op, "_RandomDataset")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def drawn_components(dataset: tf.data.Dataset) -> list[bool]:
    """Return whether random numbers may reach each component of the elements of a dataset.

    Components are the leaves of `element_spec` but None. A function of a `map` is followed operation by operation, and
    any other one as a whole. Python code in a function may draw; a generator of Python is one source of examples.

    Args:
        dataset: Any dataset.

    Example:
        >>> pairs = tf.data.Dataset.from_tensors((1.0, 2.0))
        >>> drawn_components(pairs.map(lambda x, y: (x + tf.random.uniform([]), y)).batch(4))
        [True, False]
    """
    functions = versions.private(dataset, "_functions")()
    inputs = [drawn_components(one) for one in versions.private(dataset, "_inputs")()]
    components = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if not isinstance(leaf, tf.NoneTensorSpec)]
    joined = list(itertools.chain.from_iterable(inputs))
    if len(functions) == 1 and functions[0].output_structure == dataset.element_spec:
        return _drawn_outputs(functions[0].function.graph, joined)
    if isinstance(dataset, _Random) or any(_draws(tf_graph.operation_types(one.function.graph)) for one in functions):
        return [True] * len(components)
    if len(joined) == len(components):  # of one dataset, or of those that `zip` has joined
        return joined
    alike = [one for one in inputs if len(one) == len(components)]
    return [any(flags) for flags in zip(*alike, strict=True)] or [any(joined)] * len(components)


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Return whether Python code yields or changes elements of a dataset.

    Args:
        dataset: Any dataset.

    Example:
        >>> calls_python(tf.data.Dataset.range(3)), calls_python(tf.data.Dataset.from_generator(range, tf.int64))
        (False, True)
    """
    functions = versions.private(dataset, "_functions")()
    if any(tf_graph.calls_python(one.function.graph) for one in functions):
        return True
    return any(map(calls_python, versions.private(dataset, "_inputs")()))


def _drawn_outputs(graph: Any, drawn_inputs: Sequence[bool]) -> list[bool]:
    """Return whether random numbers may reach each output of a function, whose first inputs they reach or not."""
    drawn = {tensor.name for tensor, is_drawn in zip(graph.inputs, drawn_inputs, strict=False) if is_drawn}
    for op in graph.get_operations():  # each after those that it depends on
        reached = [tensor.name in drawn for tensor in op.inputs]
        called = tf_graph.called_graphs(op)
        if op.type in _CALLS:
            outputs = _drawn_outputs(called[0], reached)
        else:
            draws = _draws({op.type}.union(*map(tf_graph.operation_types, called)))
            outputs = [draws or any(reached)] * len(op.outputs)
        drawn.update(tensor.name for tensor, is_drawn in zip(op.outputs, outputs, strict=True) if is_drawn)
    return [tensor.name in drawn for tensor in graph.outputs]


def _draws(operations: set[str]) -> bool:
    is_python = bool(operations & tf_graph.PYTHON) and not any("Generator" in one for one in operations)
    return is_python or any("Random" in operation or operation == "Multinomial" for operation in operations)
