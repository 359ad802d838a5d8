"""Analysis of the functions in a `tf.data.Dataset` (TensorFlow 2.21): random ops and Python code."""

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


def random_components(dataset: tf.data.Dataset) -> list[bool]:
    """Return, for each component of a dataset's elements, whether it may depend on random ops.

    Components are the leaves of `element_spec` except None. The function of a `map` is followed op by op, other
    functions as a whole. Python code in a function counts as random, but a Python generator does not.

    Example:
        >>> pairs = tf.data.Dataset.from_tensors((1.0, 2.0))
        >>> random_components(pairs.map(lambda x, y: (x + tf.random.uniform([]), y)).batch(4))
        [True, False]
    """
    functions = versions.private(dataset, "_functions")()
    inputs = [random_components(source) for source in versions.private(dataset, "_inputs")()]
    components = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if not isinstance(leaf, tf.NoneTensorSpec)]
    joined = list(itertools.chain.from_iterable(inputs))
    if len(functions) == 1 and functions[0].output_structure == dataset.element_spec:
        return _random_outputs(functions[0].function.graph, joined)
    operations = [tf_graph.operation_types(wrapped.function.graph) for wrapped in functions]
    if isinstance(dataset, _Random) or any(map(_has_random_ops, operations)):
        return [True] * len(components)
    if len(joined) == len(components):  # a single dataset, or a `zip` of several
        return joined
    alike = [flags for flags in inputs if len(flags) == len(components)]
    return [any(flags) for flags in zip(*alike, strict=True)] or [any(joined)] * len(components)


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Return whether Python code yields or transforms elements of a dataset.

    Example:
        >>> calls_python(tf.data.Dataset.range(3)), calls_python(tf.data.Dataset.from_generator(range, tf.int64))
        (False, True)
    """
    functions = versions.private(dataset, "_functions")()
    if any(tf_graph.calls_python(wrapped.function.graph) for wrapped in functions):
        return True
    return any(map(calls_python, versions.private(dataset, "_inputs")()))


def _random_outputs(graph: Any, random_inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of a function may be random, given which of its first inputs are."""
    random = {tensor.name for tensor, is_random in zip(graph.inputs, random_inputs, strict=False) if is_random}
    for op in graph.get_operations():  # in topological order
        inputs = [tensor.name in random for tensor in op.inputs]
        called = tf_graph.called_graphs(op)
        if op.type in _CALLS:
            outputs = _random_outputs(called[0], inputs)
        else:
            is_random_op = _has_random_ops({op.type}.union(*map(tf_graph.operation_types, called)))
            outputs = [is_random_op or any(inputs)] * len(op.outputs)
        random.update(tensor.name for tensor, is_random in zip(op.outputs, outputs, strict=True) if is_random)
    return [tensor.name in random for tensor in graph.outputs]


def _has_random_ops(operations: set[str]) -> bool:
    is_python = bool(operations & tf_graph.PYTHON) and not any("Generator" in operation for operation in operations)
    return is_python or any("Random" in operation or operation == "Multinomial" for operation in operations)
