"""Stages: sequences of consecutive layer calls, with the values that each receives and sends.

calls    a  b  c │ d  e │ f  g        balance (3, 2, 2)
            └────┼──────┼──┘          a skip connection: b is transferred directly from stage 0 to stage 2
               └─┼┘   └─┼┘
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import keras

from tfpar.pipeline.graph.ir import Call, Graph, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive layer calls of a graph, which run on one device.

    Args:
        index: Index of the stage, from 0 at the inputs of the model.
        calls: Its layer calls, in the order of the graph.
        inputs: Inputs of the model and values of earlier stages that its calls read, in the order of use. For the last
            stage also the outputs of the model that its calls do not compute.
        outputs: Values of its calls that later stages read, in the order of computation. For the last stage all
            outputs of the model, each once, in the order of the model.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        >>> stages = split_graph(trace(model), [1, 1])
        >>> stages[0].outputs == stages[1].inputs
        True
    """

    index: int
    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def computed(self) -> tuple[Value, ...]:
        """The outputs that its calls compute."""
        return tuple(value for value in self.outputs if value not in self.inputs)

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """The weights and states of its calls, each once, in the order of the calls."""
        return tuple({id(variable): variable for call in self.calls for variable in call.variables}.values())


def split_graph(graph: Graph, balance: Sequence[int]) -> tuple[Stage, ...]:
    """Split a graph into stages of given sizes.

    A value is transferred directly from the stage that computes it to each stage that reads it. The last stage receives
    all outputs of the model, because it computes the loss.

    Args:
        graph: The model.
        balance: Number of layer calls of each stage.

    Returns:
        The stages, one for each entry of `balance`.

    Raises:
        ValueError: If an entry is below 1, or the sum is not the number of layer calls.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
        >>> [len(stage.calls) for stage in split_graph(trace(model), [2, 1])]
        [2, 1]
    """
    if min(balance, default=0) < 1 or sum(balance) != len(graph.calls):
        raise ValueError(
            f"The balance must give each stage at least 1 layer call, {len(graph.calls)} in total, received "
            f"{list(balance)}, {sum(balance)} in total."
        )
    ends = [sum(balance[: index + 1]) for index in range(len(balance))]
    parts = [graph.calls[end - size : end] for end, size in zip(ends, balance, strict=True)]
    model_outputs = _model_outputs(graph)
    inputs = [_read(part) for part in parts]
    inputs[-1] = _unique([*inputs[-1], *(value for value in model_outputs if value not in _computed(parts[-1]))])
    stages = []
    for index, part in enumerate(parts):
        read_later = {value for others in inputs[index + 1 :] for value in others}
        sent = tuple(value for value in _computed(part) if value in read_later)
        stages.append(Stage(index, part, inputs[index], model_outputs if index == len(parts) - 1 else sent))
    return tuple(stages)


def cut_values(graph: Graph) -> list[tuple[Value, ...]]:
    """Return the values that cross each possible cut of a graph.

    Inputs of the model are not among them: every stage receives the inputs that it reads directly.

    Args:
        graph: The model.

    Returns:
        For a cut before layer call 1, 2, ...: the values that earlier layer calls compute and later ones read. Outputs
        of the model count as read after the last layer call.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=name) for name in "abc")])
        >>> [[value.name for value in values] for values in cut_values(trace(model))]
        [['a'], ['b']]
    """
    last_use = {value: index for index, call in enumerate(graph.calls) for value in call.inputs}
    last_use |= dict.fromkeys(_model_outputs(graph), len(graph.calls))
    live: list[Value] = []
    crossing = []
    for index, call in enumerate(graph.calls):
        if index:
            live = [value for value in live if last_use[value] >= index]
            crossing.append(tuple(live))
        live = [*live, *(value for value in call.outputs if value in last_use)]
    return crossing


def bytes_per_example(value: Value) -> int:
    """Return the bytes of a value for one example. Unknown dimensions count as 1.

    Args:
        value: A value, the examples first.

    Example:
        >>> bytes_per_example(Value("image", (None, 28, 28, 1), "float32"))
        3136
    """
    bits = re.search(r"\d+", value.dtype)
    return math.prod(size or 1 for size in value.shape[1:]) * (int(bits[0]) // 8 if bits else 1)


def owner_of(stages: Sequence[Stage], variables: Iterable[keras.Variable] = ()) -> dict[int, int]:
    """Return the stage that owns each variable: the first stage that reads it, or the last if no layer call reads it.

    Several stages may read a variable, with tied weights or a layer that is used twice. Its owner stores and updates
    it.

    Args:
        stages: All stages of a model.
        variables: The variables of the model, with those that no layer call reads.

    Returns:
        The index of a stage for the `id` of each variable.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
        >>> stages = split_graph(trace(keras.Sequential([keras.Input((4,)), *layers])), [1, 1])
        >>> owner_of(stages)[id(layers[1].kernel)]
        1
    """
    owners = {id(variable): stages[-1].index for variable in variables}
    for stage in reversed(stages):
        owners |= {id(variable): stage.index for variable in stage.variables}
    return owners


def users_of(stages: Sequence[Stage]) -> dict[int, tuple[int, ...]]:
    """Return the indices of all stages that read a variable: more than one for tied weights.

    Args:
        stages: All stages of a model.

    Returns:
        The indices for the `id` of each variable.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> layer = keras.layers.Dense(4)
        >>> stages = split_graph(trace(keras.Sequential([keras.Input((4,)), layer, layer])), [1, 1])
        >>> users_of(stages)[id(layer.kernel)]
        (0, 1)
    """
    users: dict[int, tuple[int, ...]] = collections.defaultdict(tuple)
    for stage in stages:
        for variable in stage.variables:
            users[id(variable)] += (stage.index,)
    return dict(users)


def _model_outputs(graph: Graph) -> tuple[Value, ...]:
    return _unique(leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value))


def _computed(calls: Iterable[Call]) -> dict[Value, None]:
    return dict.fromkeys(value for call in calls for value in call.outputs)


def _read(calls: Sequence[Call]) -> tuple[Value, ...]:
    computed = _computed(calls)
    return _unique(value for call in calls for value in call.inputs if value not in computed)


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))
