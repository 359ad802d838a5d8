"""Non-trainable weights that custom layers update, such as moving means: how those of parts relate to the whole.

whole    a b c d e ─► 0.9 s + 0.1 mean(a b c d e)
part 0   a b       ─► 0.9 s + 0.1 mean(a b)   ─┐
part 1       c d e ─► 0.9 s + 0.1 mean(c d e) ─┴─ their mean is the state of the whole; for a maximum it is not
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar.study import relation
from tfpar.study.mixing_layers import Runs
from tfpar.study.observation import Observation
from tfpar.study.rows import SIZES

_NUM_STEPS = 2  # a layer may update a state in every second step only


class States(NamedTuple):
    """The states that custom layers update, as indices of `model.weights`.

    Args:
        averaged: Those whose mean over the parts is the value for the batch.
        equal: Those with the same value for each part.
        others: The rest.
    """

    averaged: list[int]
    equal: list[int]
    others: list[int]


def find_states(runs: Runs, whole: Observation, parts: Sequence[Observation]) -> States:
    """Return how the states of parts relate to those of the whole batch.

    Args:
        runs: Further runs.
        whole: A run on all rows.
        parts: Runs on the parts of them.
    """
    owners = _owners(runs.model)
    relations_of: dict[int, list[relation.Relations]] = {
        number: [] for number in owners if any(number in run.states for run in (whole, *parts))
    }
    for step in range(_NUM_STEPS if relations_of else 0):
        if step:
            whole, parts = runs.whole(states=whole.states), runs.parts([part.states for part in parts])
        for number, relations in relations_of.items():
            relations.append(_relations(runs.model.weights[number], number, owners[number], whole, parts))
    kinds = {number: relation.common_relations(relations) for number, relations in relations_of.items()}
    return States(
        [number for number, kind in kinds.items() if "equal" not in kind and "mean" in kind],
        [number for number, kind in kinds.items() if "equal" in kind],
        [number for number, kind in kinds.items() if not kind & {"equal", "mean"}],
    )


def _owners(model: keras.Model) -> dict[int, keras.Layer]:
    """Return the custom layer of each of its non-trainable weights, by index; layers of Keras need no study."""
    layers: dict[int, keras.Layer] = {}
    for layer in keras_model.all_layers(model):  # from the outermost to the innermost
        layers.update({id(weight): layer for weight in layer.weights})
    owners = {number: layers.get(id(weight), model) for number, weight in enumerate(model.weights)}
    return {
        number: owner
        for number, owner in owners.items()
        if not model.weights[number].trainable and not keras_model.is_of_keras(type(owner))
    }


def _relations(
    weight: keras.Variable, number: int, owner: keras.Layer, whole: Observation, parts: Sequence[Observation]
) -> relation.Relations:
    """Return the relations of a state, compared in the lower precision of the weight and of its layer."""
    types = [tf.as_dtype(weight.dtype), tf.as_dtype(owner.compute_dtype)]
    dtype = min(types, key=lambda kind: kind.size) if all(kind.is_floating for kind in types) else types[0]
    whole_value, *values = (np.asarray(tf.cast(run.states.get(number, weight.value), dtype)) for run in (whole, *parts))
    relations = relation.relations(whole_value, values, SIZES)
    return relations if dtype.is_floating else relations & {"equal"}


def refusal(model: keras.Model, numbers: Sequence[int], training: bool, way_out: str) -> ValueError:
    """Return the error for states that are not a mean over the parts of a batch.

    Args:
        model: The model.
        numbers: The indices of the states in `model.weights`.
        training: Whether the model updates them in training.
        way_out: What the user can do.
    """
    names = ", ".join(repr(model.weights[number].path) for number in numbers)
    when = "" if training else " in inference"
    return ValueError(
        f"A layer must update its state as on one device, but after a batch{when} {names} is not the mean of its "
        f"values for the parts of the batch. {way_out}"
    )
