"""Cut a graph into stages, and say which values cross each cut.

calls    a  b  c │ d  e │ f  g        balance (3, 2, 2)
            └────┼──────┼──┘          b's value is used two stages later: it goes there directly
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
    """Consecutive calls of a graph that run on one device.

    Args:
        index: From 0.
        calls: In the order of the graph.
        inputs: What its calls take and do not make, in the order in which they take it: inputs of the model, and
            values of earlier stages. For the last stage also the outputs of the model that others make.
        outputs: What its calls make and later stages have among their inputs, in the order in which they make it;
            for the last stage the outputs of the model, each once, in the model's order, whoever makes them.

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
    def passed(self) -> tuple[Value, ...]:
        """Those inputs that are outputs as well: outputs of the model that the last stage does not make."""
        return tuple(value for value in self.outputs if value in self.inputs)

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """The weights and states that its calls read, each once, in the order of the calls."""
        return tuple({id(variable): variable for call in self.calls for variable in call.variables}.values())


def split_graph(graph: Graph, balance: Sequence[int]) -> tuple[Stage, ...]:
    """Cut a graph into consecutive stages.

    Every value goes from the stage that makes it to each stage that takes it; the last stage gets all outputs of the
    model, since the loss is computed there.

    Args:
        graph: The model.
        balance: How many calls each stage gets.

    Returns:
        The stages, one for each entry of `balance`.

    Raises:
        ValueError: If an entry is below 1, or they do not add up to the calls of the graph.
    """
    if min(balance, default=0) < 1 or sum(balance) != len(graph.calls):
        raise ValueError(
            f"The balance must give each stage at least one of the model's {len(graph.calls)} calls, {len(graph.calls)}"
            f" in all, received {list(balance)}, {sum(balance)} in all; change the entries."
        )
    ends = [sum(balance[: index + 1]) for index in range(len(balance))]
    parts = [graph.calls[end - size : end] for end, size in zip(ends, balance, strict=True)]
    returned = _returned(graph)
    inputs = [_taken(part) for part in parts]
    inputs[-1] = _unique([*inputs[-1], *(value for value in returned if value not in _made(parts[-1]))])
    stages = []
    for index, part in enumerate(parts):
        later = {value for others in inputs[index + 1 :] for value in others}
        made = tuple(value for value in _made(part) if value in later)
        stages.append(Stage(index, part, inputs[index], returned if index == len(parts) - 1 else made))
    return tuple(stages)


def crossing(graph: Graph) -> list[tuple[Value, ...]]:
    """Return what crosses each place where a graph can be cut.

    Inputs of the model are not among it: they go to the stages that take them directly, wherever it is cut.

    Args:
        graph: The model.

    Returns:
        For the cut before call 1, 2, ...: the values that calls before it make and calls after it take. Outputs of
        the model count as taken at the end.
    """
    last_use = {value: index for index, call in enumerate(graph.calls) for value in call.inputs}
    last_use |= dict.fromkeys(_returned(graph), len(graph.calls))
    alive: list[Value] = []
    crossed = []
    for index, call in enumerate(graph.calls):
        if index:
            alive = [value for value in alive if last_use[value] >= index]
            crossed.append(tuple(alive))
        alive = [*alive, *(value for value in call.outputs if value in last_use)]
    return crossed


def bytes_per_example(value: Value) -> int:
    """Return the bytes of a value for one example; a size not known counts as 1.

    Example:
        >>> bytes_per_example(Value("image", (None, 28, 28, 1), "float32"))
        3136
    """
    bits = re.search(r"\d+", value.dtype)
    return math.prod(size or 1 for size in value.shape[1:]) * (int(bits[0]) // 8 if bits else 1)


def owner_of(stages: Sequence[Stage], variables: Iterable[keras.Variable] = ()) -> dict[int, int]:
    """Return the stage that owns each variable: the first that uses it, or the last for one that no call uses.

    Tied weights and layers used twice may be read by several stages; one of them keeps and updates them.

    Args:
        stages: All stages of a model.
        variables: Those of the model, for the ones that no stage uses.

    Returns:
        The index of a stage for the `id` of each variable.
    """
    owners = {id(variable): stages[-1].index for variable in variables}
    for stage in reversed(stages):
        owners |= {id(variable): stage.index for variable in stage.variables}
    return owners


def users_of(stages: Sequence[Stage]) -> dict[int, tuple[int, ...]]:
    """Return the indices of all stages that read a variable, by its `id`: more than one where weights are tied."""
    users: dict[int, tuple[int, ...]] = collections.defaultdict(tuple)
    for stage in stages:
        for variable in stage.variables:
            users[id(variable)] += (stage.index,)
    return dict(users)


def _returned(graph: Graph) -> tuple[Value, ...]:
    return _unique(leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value))


def _made(calls: Iterable[Call]) -> dict[Value, None]:
    return dict.fromkeys(value for call in calls for value in call.outputs)


def _taken(calls: Sequence[Call]) -> tuple[Value, ...]:
    made = _made(calls)
    return _unique(value for call in calls for value in call.inputs if value not in made)


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))
