"""The table of owners: about as many bytes for each, known owners stay, each stage by itself."""

from __future__ import annotations

import keras
import numpy as np

from tfpar.placement.owners import choose_owners, num_bytes, placements


def weights(*sizes: int) -> list[keras.Variable]:
    return [keras.Variable(np.zeros(size, "float32")) for size in sizes]


def test_owners_have_about_as_many_bytes() -> None:
    variables = weights(1, 8, 3, 5, 7, 2)
    owners = choose_owners(variables, 2)
    loads = [sum(num_bytes(weight) for weight in variables if owners[id(weight)] == owner) for owner in (0, 1)]
    assert max(loads) - min(loads) <= num_bytes(variables[1])


def test_known_owners_stay_and_their_bytes_count() -> None:
    frozen, thawed = weights(8), weights(3, 3)
    known = choose_owners(frozen, 2)
    owners = choose_owners([*thawed, *frozen], 2, known)
    assert owners[id(frozen[0])] == known[id(frozen[0])]
    assert {owners[id(weight)] for weight in thawed} == {1 - known[id(frozen[0])]}


def test_each_group_is_divided_by_itself() -> None:
    variables = weights(8, 4, 2, 1)
    stages = {id(variable): number // 2 for number, variable in enumerate(variables)}
    owners = choose_owners(variables, 2, group_of=lambda weight: stages[id(weight)])
    assert [owners[id(variable)] for variable in variables] == [0, 1, 0, 1]


def test_trained_weights_of_a_stage_are_divided_and_sharded_weights_for_the_whole_model() -> None:
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    stages = {id(variable): stage for stage, layer in enumerate(layers) for variable in layer.variables}
    of_stages = placements(model, stages, 2)
    assert [of_stages[id(variable)].owner for variable in model.variables] == [0, 1, 0, 1, 0, 0, 0, 1]
    assert [of_stages[id(variable)].stage for variable in model.variables] == [0, 0, 1, 1, 1, 1, 2, 2]
    sharded = placements(model, stages, 2, shards_weights=True)
    assert sharded[id(layers[1].moving_mean)].owner == sharded[id(layers[2].kernel)].owner == 1
