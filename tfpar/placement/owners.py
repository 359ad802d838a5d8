"""Choose the owner of each weight: the replica, worker or stage that updates it and holds its optimizer state.

As in stage 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
Owners have whole weights, because Adafactor, Lamb, Muon and `clipnorm` need whole tensors.
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
    """The replica that owns a weight, and the stage that computes with it."""

    owner: int
    stage: int


def num_bytes(variable: keras.Variable) -> int:
    """Return the size of a variable in bytes.

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
    """Choose an owner for each weight, with about equally many bytes for each; return owners by weight `id`.

    Args:
        weights: Weights, in the same order in every process.
        num_owners: The number of owners.
        known: Owners chosen before, which stay, because optimizer state does not move to another worker.
        group_of: Returns the group of a weight, such as its stage. Each group is divided over the owners by itself.

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
    """Return the placement of each variable of a model in stages, by variable `id`.

    The trainable weights of each stage are divided over the replicas: each updates some and holds their optimizer
    state. The first replica owns all other variables.

    Args:
        model: A model with built layers.
        stages: The stage of each variable, by variable `id`.
        num_replicas: Number of replicas.
        shards_weights: Whether all variables are divided over the replicas, each of which runs all stages on one
            device.
    """
    if shards_weights:
        owners = choose_owners(model.variables, num_replicas)
    else:
        owners = choose_owners(model.trainable_variables, num_replicas, group_of=lambda weight: stages[id(weight)])
    return {id(variable): Placement(owners.get(id(variable), 0), stages[id(variable)]) for variable in model.variables}
