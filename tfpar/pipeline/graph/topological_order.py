"""Put the operations of a model in an order in which it is cut well.

needs            order
a ─ b ─ c ─┐     a b c d e f      a walk back from the output: a branch is finished before the next begins,
└── d ─ e ─ f                     so that few values are alive at once
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfpar._compat import keras_tracing
from tfpar._compat.keras_tracing import Recorded
from tfpar.pipeline.graph.ir import Call, Graph, Value


def build_graph(inputs: Any, recorded: Sequence[Recorded], told: Sequence[bool | None], outputs: Any) -> Graph:
    """Make a graph of what a model applied to symbolic tensors.

    Args:
        inputs: The symbolic tensors that it took, in any structure.
        recorded: What it applied, in order.
        told: What each layer is always told of `training`; None where it depends on the run.
        outputs: The symbolic tensors that it returned, in its structure.

    Raises:
        ValueError: If a tensor was made elsewhere.
    """
    values = {id(t): Value(t.name, tuple(t.shape), t.dtype) for t in keras.tree.flatten(inputs) if t is not None}
    taken = tuple(values.values())

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, keras.KerasTensor) and id(leaf) not in values:
            raise ValueError(
                "A model that is cut into stages must make every tensor in its call, received a symbolic tensor of "
                f"another graph: {leaf}; pass it as an input."
            )
        return values.get(id(leaf), leaf)

    calls = []
    for entry, training in zip(recorded, told, strict=True):
        args, kwargs = keras.tree.map_structure(value_of, (tuple(entry.args), entry.kwargs))
        name = "/".join(entry.path)
        made = tuple(Value(name, tuple(tensor.shape), tensor.dtype) for tensor in entry.outputs)
        values |= {id(tensor): value for tensor, value in zip(entry.outputs, made, strict=True)}
        calls.append(Call(entry.operation, args, kwargs, made, name, training, entry.autocast_dtype))
    returned = keras.tree.map_structure(value_of, outputs)
    return Graph(taken, tuple(_numbered(_in_order(calls, returned))), returned)


def _in_order(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Order calls so that branches stay together and few values are alive at once; drop what is of no effect.

    From the outputs backwards, each call directly after the last of those that it needs (a depth-first walk). A layer
    that no output needs runs all the same, as in Keras: it may have a state or a loss.
    """
    maker = {value: call for call in calls for value in call.outputs}
    # A layer applied twice updates its state in the order of the model.
    before: dict[Call, list[Call]] = {}
    latest: dict[int, Call] = {}
    for call in calls:
        before[call] = [maker[value] for value in call.inputs if value in maker]
        before[call] += [latest[id(call.operation)]] if id(call.operation) in latest else []
        latest[id(call.operation)] = call
    roots = [maker[leaf] for leaf in keras.tree.flatten(outputs) if isinstance(leaf, Value) and leaf in maker]
    done: set[Call] = set()
    ordered = _walk(roots, before, done)
    for call in calls:
        if isinstance(call.operation, keras.Layer | keras_tracing.AddedLoss) and call not in done:
            own = _walk([call], before, done)
            needed = {other for new in own for other in before[new]}
            place = max((index + 1 for index, other in enumerate(ordered) if other in needed), default=0)
            ordered[place:place] = own
    return ordered


def _walk(roots: Iterable[Call], before: Mapping[Call, Sequence[Call]], done: set[Call]) -> list[Call]:
    """Return calls in the order in which a depth-first walk leaves them, and add them to `done`.

    Without recursion: models are deeper than Python's stack.
    """
    left = []
    for root in roots:
        waiting = [] if root in done else [(root, iter(before[root]))]
        while waiting:
            call, needed = waiting[-1]
            following = next((other for other in needed if other not in done), None)
            if following is None:
                waiting.pop()
                done.add(call)
                left.append(call)
            else:
                waiting.append((following, iter(before[following])))
    return left


def _numbered(calls: Iterable[Call]) -> list[Call]:
    """Give each call a name of its own."""
    counts: collections.Counter[str] = collections.Counter()
    numbered = []
    for call in calls:
        counts[call.name] += 1
        again = f"{call.name}#{counts[call.name]}"
        numbered.append(call if counts[call.name] == 1 else dataclasses.replace(call, name=again))
    return numbered
