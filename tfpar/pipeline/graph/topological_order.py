"""Topological order of layer calls, with few live values at each cut.

graph            order
a ─ b ─ c ─┐     a b c d e f      depth-first from the output: each branch ends before the next begins,
└── d ─ e ─ f                     so that few values are live at the same time
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfpar._compat.models import keras_loss_operations
from tfpar._compat.models.keras_recorded import Recorded
from tfpar.pipeline.graph.ir import Call, Graph, Value


def build_graph(
    inputs: Any,
    recorded: Sequence[Recorded],
    training_arguments: Sequence[tuple[bool | None, bool | None]],
    outputs: Any,
) -> Graph:
    """Build the graph of recorded layer calls.

    Args:
        inputs: Symbolic inputs of the model, in any structure.
        recorded: Layer calls in the order of the model.
        training_arguments: `Call.training` of each layer call.
        outputs: Symbolic outputs of the model, in any structure.

    Raises:
        ValueError: If a tensor belongs to another graph.

    Example:
        >>> relu, entry = keras.layers.ReLU(name="relu"), keras.Input((4,))
        >>> output = relu(entry)
        >>> recorded = Recorded(relu, (entry,), {}, (output,), ("relu",), None, None)
        >>> [call.name for call in build_graph(entry, [recorded], [(True, False)], output).calls]
        ['relu']
    """
    values = {id(t): Value(t.name, tuple(t.shape), t.dtype) for t in keras.tree.flatten(inputs) if t is not None}
    graph_inputs = tuple(values.values())

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, keras.KerasTensor) and id(leaf) not in values:
            raise ValueError(
                "A model that is divided over devices must compute every tensor in its call, received a symbolic "
                f"tensor of another graph: {leaf}; pass it as an input."
            )
        return values.get(id(leaf), leaf)

    calls = []
    for entry, training in zip(recorded, training_arguments, strict=True):
        args, kwargs = keras.tree.map_structure(value_of, (tuple(entry.args), entry.kwargs))
        name = "/".join(entry.path)
        call_outputs = tuple(Value(name, tuple(tensor.shape), tensor.dtype) for tensor in entry.outputs)
        values |= {id(tensor): value for tensor, value in zip(entry.outputs, call_outputs, strict=True)}
        calls.append(Call(entry.operation, args, kwargs, call_outputs, name, training, entry.autocast_dtype))
    graph_outputs = keras.tree.map_structure(value_of, outputs)
    return Graph(graph_inputs, tuple(_with_unique_names(_sorted(calls, graph_outputs))), graph_outputs)


def _sorted(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Sort calls depth-first from the outputs, and drop operations without effect.

    As in Keras, layers that no output depends on still run, because they may have states or losses. They run as early
    as possible.
    """
    producer = {value: call for call in calls for value in call.outputs}
    # Several calls of a layer update its state in the order of the model.
    dependencies: dict[Call, list[Call]] = {}
    latest: dict[int, Call] = {}
    for call in calls:
        dependencies[call] = [producer[value] for value in call.inputs if value in producer]
        dependencies[call] += [latest[id(call.operation)]] if id(call.operation) in latest else []
        latest[id(call.operation)] = call
    roots = [producer[leaf] for leaf in keras.tree.flatten(outputs) if isinstance(leaf, Value) and leaf in producer]
    visited: set[Call] = set()
    ordered = _postorder(roots, dependencies, visited)
    for call in calls:
        if isinstance(call.operation, keras.Layer | keras_loss_operations.AddedLoss) and call not in visited:
            added = _postorder([call], dependencies, visited)
            needed = {dependency for new in added for dependency in dependencies[new]}
            position = max((index + 1 for index, earlier in enumerate(ordered) if earlier in needed), default=0)
            ordered[position:position] = added
    return ordered


def _postorder(roots: Iterable[Call], dependencies: Mapping[Call, Sequence[Call]], visited: set[Call]) -> list[Call]:
    """Visit calls in depth-first postorder, without recursion: models can be deeper than Python's stack."""
    order = []
    for root in roots:
        stack = [] if root in visited else [(root, iter(dependencies[root]))]
        while stack:
            call, remaining = stack[-1]
            dependency = next((other for other in remaining if other not in visited), None)
            if dependency is None:
                stack.pop()
                visited.add(call)
                order.append(call)
            else:
                stack.append((dependency, iter(dependencies[dependency])))
    return order


def _with_unique_names(calls: Iterable[Call]) -> list[Call]:
    """Append "#2", "#3", ... to repeated names."""
    counts: collections.Counter[str] = collections.Counter()
    renamed = []
    for call in calls:
        counts[call.name] += 1
        name = f"{call.name}#{counts[call.name]}"
        renamed.append(call if counts[call.name] == 1 else dataclasses.replace(call, name=name))
    return renamed
