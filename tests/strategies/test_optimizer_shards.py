"""`Mirrored(shard="optimizer")`: the bits of the unsharded result, and each slot on one device alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import objective_cases, parity_cases, small
from tests.support.extent import sampled
from tests.support.shard_cases import CASES_HERE, OPTIMIZERS, classifier
from tfpar._compat.optimizers import keras_optimizer, keras_sharded_slots

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def sharded(num_replicas: int = 3) -> tfpar.Mirrored:
    return tfpar.Mirrored(DEVICES[:num_replicas], shard="optimizer")


def state(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_same_bits(build: Any, data: Any, num_replicas: int = 3, **fit: Any) -> None:
    found = []
    for strategy in (tfpar.Mirrored(DEVICES[:num_replicas]), sharded(num_replicas)):
        trainer = tfpar.Trainer(build, strategy, seed=0)
        history = trainer.fit(data, epochs=2, verbose=0, **fit).history
        found.append((history, state(trainer.model)))
        for weight in trainer.model.weights:
            first, *others = (memory.numpy() for memory in keras_sharded_slots.memories(weight))
            assert all(np.array_equal(first, other) for other in others), "replicas hold different weights"
    (history, arrays), (of_shards, arrays_of_shards) = found
    assert of_shards == history
    for one, other in zip(arrays, arrays_of_shards, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, of_ci=[*OPTIMIZERS][::2]))
def test_weights_state_and_logs_are_those_of_unsharded_replicas_bit_for_bit(name: str) -> None:
    assert_same_bits(classifier(OPTIMIZERS[name]), small.data())  # the last batch has fewer examples than replicas


CASES = parity_cases.CASES | objective_cases.CASES


@pytest.mark.extended
@pytest.mark.parametrize("name", sampled(CASES, of_ci=CASES_HERE))
def test_lookups_added_losses_and_objectives_keep_their_bits(name: str) -> None:
    assert_same_bits(CASES[name].build, CASES[name].data(), 2, **CASES[name].fit)


def slots(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.optimizer.variables if len(variable.shape) > 0]


def bytes_of(model: keras.Model) -> list[int]:
    """The bytes of slots on each device."""
    sizes = [0, 0, 0]
    for slot in slots(model):
        (memory,) = keras_sharded_slots.memories(slot)
        sizes[DEVICES.index(memory.device[-5:])] += memory.numpy().nbytes
    return sizes


def test_each_device_holds_about_the_same_bytes_of_slots_and_the_preview_shows_them() -> None:
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), sharded(), seed=0)
    preview = trainer.preview(small.data())
    sizes = bytes_of(trainer.model)
    weights = 2 * 4 * trainer.model.count_params()
    assert sum(sizes) == weights
    largest = max(weight.numpy().nbytes for weight in trainer.model.trainable_variables)
    assert max(sizes) - min(sizes) <= 2 * largest
    replicated = sum(
        variable.numpy().nbytes for variable in trainer.model.optimizer.variables if len(variable.shape) == 0
    )
    assert [row.state_bytes - weights for row in preview.rows] == [size + replicated for size in sizes]
    assert "optimizer state sharded" in str(preview)


def test_one_replica_has_nothing_to_divide() -> None:
    assert sharded(1).describe() == "Mirrored over 1 replica on CPU:0"
    assert_same_bits(classifier(keras.optimizers.Adam), small.data(), 1)


def test_counters_of_an_optimizer_are_no_slots_of_as_many_weights() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable(np.zeros(3)), keras.Variable(np.zeros(2))])
    assert len(optimizer.variables) == 2, "iterations and learning rate"
    assert keras_optimizer.slots_of_weights(optimizer) == []


def test_keras_own_fit_is_refused_with_sharded_state() -> None:
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), sharded(2), seed=0)
    trainer.build(small.data())
    with pytest.raises(ValueError, match=r"state is sharded, and Keras' own fit .* Train with tfpar.fit"):
        keras.Model.fit(trainer.model, small.data().take(2), verbose=0)
    tfpar.Trainer(lambda: trainer.model, tfpar.SingleDevice("CPU:0")).fit(small.data().take(2), verbose=0)
    trainer.model.fit(small.data().take(2), verbose=0)  # on one device again
