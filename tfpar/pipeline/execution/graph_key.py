"""Keys of traced graphs: two graphs with the same key compute the same, whatever their layers are called.

    blocks/3/dense/MatMul(x, kernel)   ─►   7: MatMul(2:0, 5:0), transpose_a=False, transpose_b=False, T=float32

A key has the types, attributes, inputs, control inputs and devices of all operations, with numbers for their names. A
graph with a function, such as the body of a loop, or with a `tf.custom_gradient` equals no other one: an attribute has
a name that is used once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfpar.reduction.gradient_addition import tensors_of

_COLOCATION = "_class"


def graph_key(graph: Any, device: str) -> tuple[Any, ...]:
    """Return the key of a graph.

    Args:
        graph: A graph.
        device: The device of its operations; another one is part of the key.

    Example:
        >>> def graph(name: str, factor: float) -> tf.Graph:
        ...     with tf.Graph().as_default() as found:
        ...         tf.multiply(tf.constant(factor), 2.0, name=name)
        ...     return found
        >>> one = graph_key(graph("one", 3.0), "CPU:0")
        >>> one == graph_key(graph("two", 3.0), "CPU:0"), one == graph_key(graph("one", 4.0), "CPU:0")
        (True, False)
    """
    nodes = graph.as_graph_def().node
    numbers = {node.name: number for number, node in enumerate(nodes)}
    own = _own_device(device)

    def renamed(name: str) -> tuple[Any, ...]:
        first, _, index = name.lstrip("^").partition(":")
        return name.startswith("^"), numbers.get(first, first), index

    return tuple(
        (
            node.op,
            own(node.device),
            tuple(map(renamed, node.input)),
            tuple(renamed(name.decode()[len("loc:@") :]) for name in node.attr[_COLOCATION].list.s),
            tuple(
                (name, node.attr[name].SerializeToString(deterministic=True))
                for name in sorted(node.attr)
                if name != _COLOCATION
            ),
        )
        for node in nodes
    )


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


def _own_device(device: str) -> Any:
    def short(name: str) -> tuple[str | None, int | None]:
        spec = tf.DeviceSpec.from_string(name)
        return spec.device_type, spec.device_index

    own = short(device if device.startswith("/") else f"/device:{device}")

    @functools.cache
    def found(name: str) -> str:
        return "" if not name or short(name) == own else name

    return found
