"""Stages: consecutive layer calls, and the values that each stage receives and sends.

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
    """Consecutive layer calls of a graph that run together.

    Args:
        index: Index of the stage. Stage 0 receives the inputs of the model.
        calls: Layer calls in the order of the graph.
        inputs: The model inputs and values of earlier stages that the calls read, in the order of use. The last stage
            also receives all other outputs of the model.
        outputs: The values that later stages read, in the order of computation. For the last stage, all outputs of the
            model, each once.

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
        """The outputs that the stage itself computes."""
        return tuple(value for value in self.outputs if value not in self.inputs)

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """The variables of the calls, each once, in the order of the calls."""
        return tuple({id(variable): variable for call in self.calls for variable in call.variables}.values())


def split_graph(graph: Graph, balance: Sequence[int]) -> tuple[Stage, ...]:
    """Split a graph into stages of given sizes.

    Values are transferred directly from the stage that computes them to each stage that reads them. The last stage
    receives all outputs of the model, because it computes the loss.

    Args:
        graph: The model.
        balance: Number of layer calls of each stage.

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
    stage_calls = [graph.calls[end - size : end] for end, size in zip(ends, balance, strict=True)]
    model_outputs = _model_outputs(graph)
    inputs = [_read(calls) for calls in stage_calls]
    inputs[-1] = _unique([*inputs[-1], *(value for value in model_outputs if value not in _computed(stage_calls[-1]))])
    stages = []
    for index, calls in enumerate(stage_calls):
        read_later = {value for later in inputs[index + 1 :] for value in later}
        sent = tuple(value for value in _computed(calls) if value in read_later)
        stages.append(Stage(index, calls, inputs[index], model_outputs if index == len(balance) - 1 else sent))
    return tuple(stages)


def cut_values(graph: Graph) -> list[tuple[Value, ...]]:
    """Return the values that cross each possible cut of a graph.

    Model inputs do not cross cuts: each stage receives them directly.

    Returns:
        For cuts before layer calls 1, 2, ...: the values that earlier layer calls compute and later ones read. Outputs
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

    Example:
        >>> bytes_per_example(Value("image", (None, 28, 28, 1), "float32"))
        3136
    """
    bits = re.search(r"\d+", value.dtype)
    return math.prod(size or 1 for size in value.shape[1:]) * (int(bits[0]) // 8 if bits else 1)


def variable_owners(stages: Sequence[Stage], variables: Iterable[keras.Variable] = ()) -> dict[int, int]:
    """Return the stage that owns each variable: the first that reads it, or the last if none does.

    Several stages may read a variable, with tied weights or reused layers. Its owner stores and updates it.

    Args:
        stages: All stages of a model.
        variables: All variables of the model, even if no layer call reads them.

    Returns:
        The index of the owning stage by the `id` of the variable.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
        >>> stages = split_graph(trace(keras.Sequential([keras.Input((4,)), *layers])), [1, 1])
        >>> variable_owners(stages)[id(layers[1].kernel)]
        1
    """
    owners = {id(variable): stages[-1].index for variable in variables}
    for stage in reversed(stages):
        owners |= {id(variable): stage.index for variable in stage.variables}
    return owners


def variable_readers(stages: Sequence[Stage]) -> dict[int, tuple[int, ...]]:
    """Return the stages that read each variable; several read tied weights.

    Args:
        stages: All stages of a model.

    Returns:
        The indices of the stages by the `id` of the variable.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> layer = keras.layers.Dense(4)
        >>> stages = split_graph(trace(keras.Sequential([keras.Input((4,)), layer, layer])), [1, 1])
        >>> variable_readers(stages)[id(layer.kernel)]
        (0, 1)
    """
    readers: dict[int, tuple[int, ...]] = collections.defaultdict(tuple)
    for stage in stages:
        for variable in stage.variables:
            readers[id(variable)] += (stage.index,)
    return dict(readers)


def _model_outputs(graph: Graph) -> tuple[Value, ...]:
    return _unique(leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value))


def _computed(calls: Iterable[Call]) -> dict[Value, None]:
    return dict.fromkeys(value for call in calls for value in call.outputs)


def _read(calls: Sequence[Call]) -> tuple[Value, ...]:
    computed = _computed(calls)
    return _unique(value for call in calls for value in call.inputs if value not in computed)


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))
