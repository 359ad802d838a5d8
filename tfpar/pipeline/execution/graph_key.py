"""Keys of traced graphs: two graphs with the same key compute the same, whatever their layers are called.

    blocks/3/dense/MatMul(x, kernel)   ─►   7: MatMul(2:0, 5:0), transpose_a=False, transpose_b=False, T=float32

A key has the types, attributes, inputs and control inputs of all operations, with numbers for their names, and for each
`tf.custom_gradient` what it computes. A graph with a function, such as the body of a loop, equals no other one: an
attribute has a name that is used once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_custom_gradient
from tfpar.reduction.gradient_addition import tensors_of

_COLOCATION, _GRADIENT = "_class", "_gradient_op_type"


def graph_key(graph: Any) -> tuple[Any, ...]:
    """Return the key of a graph that runs on one device.

    Args:
        graph: A graph.

    Example:
        >>> def graph(name: str, factor: float) -> tf.Graph:
        ...     with tf.Graph().as_default() as found:
        ...         tf.multiply(tf.constant(factor), 2.0, name=name)
        ...     return found
        >>> one = graph_key(graph("one", 3.0))
        >>> one == graph_key(graph("two", 3.0)), one == graph_key(graph("one", 4.0))
        (True, False)
    """
    nodes = graph.as_graph_def().node
    numbers = {node.name: number for number, node in enumerate(nodes)}

    def renamed(name: str) -> tuple[Any, ...]:
        first, _, index = name.lstrip("^").partition(":")
        return name.startswith("^"), numbers.get(first, first), index

    def of_tensor(tensor: tf.Tensor) -> Hashable:
        here = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
        return (numbers[tensor.op.name], tensor.value_index) if here else tensor.ref()

    def attributes(node: Any) -> Iterator[tuple[str, Any]]:
        for name in sorted(node.attr):
            if name == _COLOCATION:
                yield name, tuple(renamed(one.decode().removeprefix("loc:@")) for one in node.attr[name].list.s)
            elif name == _GRADIENT:
                yield name, tf_custom_gradient.gradient_key(node.attr[name].s.decode(), of_tensor)
            else:
                yield name, node.attr[name].SerializeToString(deterministic=True)

    return tuple((node.op, tuple(map(renamed, node.input)), tuple(attributes(node))) for node in nodes)


def depends_on_arguments_alone(graph: Any) -> bool:
    """Return whether a graph reads no tensor outside of it, and no state that TensorFlow holds for an operation.

    Args:
        graph: The graph of a function that is being traced.
    """
    return not graph.captures and not any(op.op_def.is_stateful for op in graph.get_operations())


def tensor_keys(graph: Any, tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Return the places of tensors in a graph, with None for None; a ragged or sparse tensor has several.

    Args:
        graph: The graph whose key they belong to.
        tensors: Tensors of it, of any kind, or None.
    """
    numbers = {op: number for number, op in enumerate(graph.get_operations())}

    def key(tensor: Any) -> Any:
        if tensor is None:
            return None
        return type(tensor).__name__, tuple((numbers[one.op], one.value_index) for one in tensors_of(tensor))

    return tuple(map(key, tensors))
