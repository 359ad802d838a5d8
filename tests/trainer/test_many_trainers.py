"""Many trainers in one process, as in a search: none leaves its model or its graphs in memory."""

from __future__ import annotations

import copy

import keras
import pytest

import tfpar
from tests.support import many_trainers, small

pytestmark = pytest.mark.usefixtures("logical_cpus")
# What a trainer leaves at most: TensorFlow notes a few names for each function.
NUM_OBJECTS = 50


@pytest.mark.extended
@pytest.mark.parametrize("name", many_trainers.STRATEGIES)
def test_a_trainer_leaves_nothing_in_memory(name: str) -> None:
    make = many_trainers.STRATEGIES[name]
    shared = make()
    before, _, after = many_trainers.train_many(strategy or make() for strategy in (shared, None, shared))
    assert after.num_models == 0
    assert after.num_objects - before.num_objects <= 2 * NUM_OBJECTS


def test_a_trained_model_is_copied_without_the_state_of_its_strategy() -> None:
    trainer = tfpar.Trainer(small.build_model, tfpar.Pipeline(2, 3, balance="parameters"), seed=0)
    trainer.fit(small.data(), verbose=0)
    twin = copy.deepcopy(trainer.model)
    small.assert_same_state(twin.get_weights(), trainer.model.get_weights())
    assert vars(twin).keys() == vars(keras.models.clone_model(trainer.model)).keys()
