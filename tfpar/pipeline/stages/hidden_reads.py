"""Weights that a function with a gradient of its own reads, without taking them as arguments.

    kernel ──────────────┐                          kernel ──┐
                         ▼                                   ▼
    inputs ──► f: matmul(inputs, kernel) ──►        inputs ──► f: matmul(inputs, kernel) ──►
    reads the kernel: no gradient reaches it        takes it: its gradient is the second of f

TensorFlow finds the variables that such a function reads, and gives its gradient function their list. A stage gives
layers the values of their weights, which are no variables: their gradients would be missing without a word.
`tf.recompute_grad` and `keras.remat` return such functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpar._compat import tf_custom_gradient

_GRADIENT = "_gradient_op_type"


def hidden_reads(graph: Any, tensors: Sequence[Any]) -> list[int]:
    """Return which tensors functions with a gradient of their own read, but do not take as arguments.

    Args:
        graph: The graph of a forward pass.
        tensors: Tensors of it, such as the values of weights.

    Returns:
        The places of those tensors in the list.

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
    whole = graph.as_graph_def()
    functions = {one.signature.name: one for one in whole.library.function}
    read = _Reads(functions).of(whole.node)
    return [place for place, tensor in enumerate(tensors) if tensor.op.name in read]


class _Reads:
    """The nodes that functions with a gradient of their own read.

    Args:
        functions: The functions of the graph by name, such as the bodies of loops.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._known: dict[str, list[int]] = {}

    def of(self, nodes: Iterable[Any]) -> set[str]:
        """Return the names of all nodes of a graph, and arguments of a function, that hidden reads depend on."""
        by_name = {node.name: node for node in nodes}
        found: set[str] = set()
        for node in by_name.values():
            inputs = [name for name in node.input if not name.startswith("^")]
            if _GRADIENT in node.attr:
                num_results = tf_custom_gradient.num_results(node.attr[_GRADIENT].s.decode())
                found |= _before(by_name, inputs[:num_results], stop=inputs[num_results:])
            for function in self._called(node):
                arguments = self._functions[function].signature.input_arg
                of_function = inputs[len(inputs) - len(arguments) :]  # after the condition of a branch
                found |= _before(by_name, [of_function[place] for place in self._of_function(function)])
        return found

    def _called(self, node: Any) -> Iterator[str]:
        """Return the functions that a node calls."""
        names = [node.op]
        for value in node.attr.values():
            names += [value.func.name, *(one.name for one in value.list.func)]
        return (name for name in names if name in self._functions)

    def _of_function(self, name: str) -> list[int]:
        """Return the places of the arguments of a function that hidden reads in it depend on."""
        if name not in self._known:
            self._known[name] = []  # of a function that calls itself
            function = self._functions[name]
            found = self.of(function.node_def)
            self._known[name] = [i for i, one in enumerate(function.signature.input_arg) if one.name in found]
        return self._known[name]


def _before(nodes: Mapping[str, Any], tensors: Iterable[str], stop: Iterable[str] = ()) -> set[str]:
    """Return the names of the nodes that tensors depend on, not beyond others."""
    waiting, ends = list(tensors), {*stop}
    seen, found = {*ends}, set[str]()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen or tensor.startswith("^"):
            continue
        seen.add(tensor)
        name = tensor.partition(":")[0]
        found.add(name)
        if name in nodes:
            waiting += nodes[name].input
    return found
