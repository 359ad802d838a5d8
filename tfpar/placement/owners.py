"""The table of owners: which replica, worker or stage stores a weight, updates it and holds its optimizer state.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. Owners have
whole weights: Adafactor, Lamb, Muon and `clipnorm` need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar.placement.largest_first import largest_first


class Placement(NamedTuple):
    """The place of a weight in a grid of replicas and stages.

    Args:
        owner: The replica.
        stage: The stage.
    """

    owner: int
    stage: int


def num_bytes(variable: keras.Variable) -> int:
    """Return the size of a variable.

    Args:
        variable: Any variable with a shape.

    Example:
        >>> num_bytes(keras.Variable(np.zeros([3, 4], "float32")))
        48
    """
    size: int = tf.as_dtype(variable.dtype).size
    return int(np.prod(variable.shape)) * size


def choose_owners(
    weights: Iterable[keras.Variable],
    num_owners: int,
    known: Mapping[int, int] = MappingProxyType({}),
    group_of: Callable[[keras.Variable], Hashable] = lambda weight: None,
) -> dict[int, int]:
    """Return the owner of each weight by the weight's `id`, with about as many bytes for each.

    Args:
        weights: Weights, in the same order in every process.
        num_owners: The number of owners.
        known: Owners that were chosen before, which stay: optimizer state does not move to another worker.
        group_of: Returns the group of a weight. Each group is divided over the owners by itself, such as the weights
            of each stage.

    Example:
        >>> kernel, bias = keras.Variable(np.zeros([3, 4])), keras.Variable(np.zeros([4]))
        >>> list(choose_owners([bias, kernel], num_owners=2).values())
        [1, 0]
        >>> list(choose_owners([bias, kernel], num_owners=2, known={id(bias): 0}).values())
        [0, 1]
    """
    groups: dict[Hashable, list[keras.Variable]] = {}
    for weight in weights:
        groups.setdefault(group_of(weight), []).append(weight)
    owners: dict[int, int] = {}
    for group in groups.values():
        loads, new = [0] * num_owners, [weight for weight in group if id(weight) not in known]
        for weight in group:
            if id(weight) in known:
                owners[id(weight)] = known[id(weight)]
                loads[known[id(weight)]] += num_bytes(weight)
        numbers = largest_first(list(map(num_bytes, new)), num_owners, loads)
        owners.update(zip(map(id, new), numbers, strict=True))
    return owners


def placements(
    model: keras.Model, stages: Mapping[int, int], num_replicas: int, *, shards_weights: bool = False
) -> dict[int, Placement]:
    """Return the home of each variable of a model in stages, by the variable's `id`.

    The trained weights of each stage are divided over the replicas, so that each updates a part of them and holds a
    part of the optimizer's state. The other variables are on the first replica.

    Args:
        model: A model with built layers.
        stages: The stage of each variable, by the variable's `id`.
        num_replicas: Number of replicas.
        shards_weights: Whether all variables are divided, those of all stages together: each replica has all stages on
            one device.
    """
    if shards_weights:
        owners = choose_owners(model.variables, num_replicas)
    else:
        owners = choose_owners(model.trainable_variables, num_replicas, group_of=lambda weight: stages[id(weight)])
    return {id(variable): Placement(owners.get(id(variable), 0), stages[id(variable)]) for variable in model.variables}
