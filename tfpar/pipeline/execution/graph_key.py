"""Keys of traced graphs: two graphs with the same key compute the same, whatever their layers are called.

    blocks/3/dense/MatMul(x, kernel)   ─►   7: MatMul(2:0, 5:0), transpose_a=False, transpose_b=False, T=float32

A key has the types, attributes, inputs and control inputs of all operations, with numbers for their names, and for each
`tf.custom_gradient` and the body of each loop what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
    whole = graph.as_graph_def(add_shapes=True)
    numbers = {node.name: number for number, node in enumerate(whole.node)}

    def of_tensor(tensor: tf.Tensor) -> Hashable:
        here = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
        return (numbers[tensor.op.name], tensor.value_index) if here else None

    gradients = tuple(one.SerializeToString(deterministic=True) for one in whole.library.gradient)
    functions = {one.signature.name: one for one in whole.library.function}
    return gradients, _Keys(functions, of_tensor).of_nodes(whole.node, numbers)


class _Keys:
    """The keys of the nodes of a graph and of its functions.

    Args:
        functions: The functions of the graph by name, such as the bodies of loops.
        of_tensor: Returns the key of a tensor that a gradient function reads; None for one of another graph.
    """

    def __init__(self, functions: Mapping[str, Any], of_tensor: Callable[[tf.Tensor], Hashable]) -> None:
        self._functions, self._of_tensor = functions, of_tensor
        self._known: dict[str, Hashable] = {}

    def of_nodes(self, nodes: Iterable[Any], numbers: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the key of each node.

        Args:
            nodes: Nodes.
            numbers: The number of each node, and of each argument of their function, by name.
        """

        def attributes(node: Any) -> Iterator[tuple[str, Any]]:
            for name in sorted(node.attr):
                if name == _COLOCATION:
                    classes = [one.decode().removeprefix("loc:@") for one in node.attr[name].list.s]
                    yield name, tuple(_numbered(one, numbers) for one in classes)
                else:
                    yield name, self._of_attribute(name, node.attr[name])

        def inputs(node: Any) -> tuple[Any, ...]:
            return tuple(_numbered(one, numbers) for one in node.input)

        return tuple((self._of_function(node.op), inputs(node), tuple(attributes(node))) for node in nodes)

    def _of_attribute(self, name: str, value: Any) -> Hashable:
        if name == _GRADIENT:
            return tf_custom_gradient.gradient_key(value.s.decode(), self._of_tensor)
        if value.WhichOneof("value") == "func":
            return self._of_function(value.func.name), _in_order(value.func.attr)
        return bytes(value.SerializeToString(deterministic=True))

    def _of_function(self, name: str) -> Hashable:
        """Return the key of a function of the graph; the name of an operation of TensorFlow."""
        if name in self._functions and name not in self._known:
            self._known[name] = self._of_body(self._functions[name])
        return self._known.get(name, name)

    def _of_body(self, function: Any) -> Hashable:
        signature = function.signature
        names = [*(one.name for one in signature.input_arg), *(node.name for node in function.node_def)]
        numbers = {name: number for number, name in enumerate(names)}
        arguments = [(one.type, function.arg_attr[place].attr) for place, one in enumerate(signature.input_arg)]
        results = [_numbered(function.ret[one.name], numbers) for one in signature.output_arg]
        last = [_numbered(function.control_ret[one], numbers) for one in signature.control_output]
        return (
            tuple((kind, _in_order(attributes)) for kind, attributes in arguments),
            self.of_nodes(function.node_def, numbers),
            tuple(results),
            tuple(last),
            _in_order(function.attr),
        )


def _numbered(name: str, numbers: Mapping[str, int]) -> tuple[Any, ...]:
    """Return the place of an input: whether it is a control input, the number of its node, and its place there."""
    first, _, place = name.removeprefix("^").partition(":")
    return name.startswith("^"), numbers.get(first, first), place


def _in_order(attributes: Mapping[str, Any]) -> tuple[tuple[str, bytes], ...]:
    names = sorted(name for name in attributes if name != "_user_specified_name")
    return tuple((name, attributes[name].SerializeToString(deterministic=True)) for name in names)


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
