"""`Mirrored(shard="optimizer")`: the bits of the unsharded result, and each slot on one device alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import checkpoint_matrix, objective_cases, parity_cases, small
from tests.support.extent import sampled
from tests.support.shard_cases import CASES_HERE, OPTIMIZERS, classifier
from tfpar._compat import keras_optimizer, tf_replica_memory

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
            first, *others = (memory.numpy() for memory in tf_replica_memory.memories(weight))
            assert all(np.array_equal(first, other) for other in others), "replicas hold different weights"
    (history, arrays), (of_shards, arrays_of_shards) = found
    assert of_shards == history
    for one, other in zip(arrays, arrays_of_shards, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, of_ci=[*OPTIMIZERS][::2]))
def test_weights_state_and_logs_are_those_of_unsharded_replicas_bit_for_bit(name: str) -> None:
    assert_same_bits(classifier(OPTIMIZERS[name]), small.data())  # the last batch has fewer examples than replicas


CASES = parity_cases.CASES | objective_cases.CASES


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sampled(CASES, of_ci=CASES_HERE))
def test_lookups_added_losses_and_objectives_keep_their_bits(name: str) -> None:
    assert_same_bits(CASES[name].build, CASES[name].data(), 2, **CASES[name].fit)


def test_objectives_may_leave_a_trainable_layer_out() -> None:
    def build() -> keras.Model:
        model = objective_cases.gan()
        model.unused = keras.layers.Dense(3)
        model.unused.build((None, 2))
        return model

    assert_same_bits(build, CASES["GAN"].data().take(2), 2)


def slots(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.optimizer.variables if len(variable.shape) > 0]


def bytes_of(model: keras.Model) -> list[int]:
    """The bytes of slots on each device."""
    sizes = [0, 0, 0]
    for slot in slots(model):
        (memory,) = tf_replica_memory.memories(slot)
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


@pytest.mark.extended
def test_slots_of_a_model_that_was_trained_elsewhere_move_to_their_owners() -> None:
    model = classifier(keras.optimizers.Adam)()
    expected = classifier(keras.optimizers.Adam)()
    expected.set_weights(model.get_weights())
    for one in (model, expected):
        tfpar.Trainer(lambda one=one: one, tfpar.SingleDevice()).fit(small.data(), verbose=0)
    tfpar.Trainer(lambda: expected, tfpar.Mirrored(DEVICES)).fit(small.data(), verbose=0)
    tfpar.Trainer(lambda: model, sharded()).fit(small.data(), verbose=0)
    assert min(bytes_of(model)) > 0
    for one, other in zip(state(model), state(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    tfpar.Trainer(lambda: model, tfpar.Mirrored(DEVICES)).fit(small.data(), verbose=0)
    assert all(len(tf_replica_memory.memories(slot)) == 3 for slot in slots(model)), "they are mirrored again"


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights_swaps_an_average_once(swap_on_epoch: bool) -> None:
    found = []
    for strategy in (tfpar.Mirrored(DEVICES), sharded()):
        build = classifier(lambda: keras.optimizers.Adam(0.01, use_ema=True))
        trainer = tfpar.Trainer(build, strategy, seed=0)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch)
        history = trainer.fit(small.data(), epochs=2, verbose=0, validation_data=small.data(), callbacks=[swap]).history
        found.append((history, state(trainer.model)))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_belong_to_the_weight_with_the_longest_matching_path() -> None:
    first, second = (keras.Variable(np.zeros([2], "float32"), name=name) for name in ("kernel", "kernel_2"))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([first, second])
    assert [weight for _, weight in keras_optimizer.slots_of(optimizer, [first, second])] == [first, second]


LAYOUTS = {
    "sharded": sharded,
    **{name: checkpoint_matrix.IN_ONE_PROCESS[name] for name in ("one device", "pipeline of 2")},
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("first", "then"), [("sharded", "one device"), ("one device", "sharded"), ("sharded", "pipeline of 2")]
)
def test_a_checkpoint_of_shards_continues_under_another_layout(first: str, then: str, tmp_path: Path) -> None:
    checkpoint_matrix.begin(LAYOUTS[first](), tmp_path)
    history, arrays = checkpoint_matrix.end(LAYOUTS[then](), tmp_path)
    expected_history, expected = checkpoint_matrix.end(tfpar.SingleDevice(), tmp_path / "whole")
    assert history.keys() == expected_history.keys()
    for one, other in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_evaluation_and_prediction_are_those_of_one_device() -> None:
    results = []
    for strategy in (tfpar.SingleDevice(), sharded()):
        trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), strategy, seed=0)
        trainer.fit(small.data(), verbose=0)
        results.append((trainer.evaluate(small.data(), verbose=0), trainer.predict(small.data(), verbose=0)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_a_saved_model_continues_in_plain_keras(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(classifier(OPTIMIZERS["norm, average"]), sharded(), seed=0)
    trainer.fit(small.data(), verbose=0)
    trainer.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    small.assert_same_state(state(loaded), state(trainer.model))
    histories = [one.fit(small.data(), verbose=0).history for one in (loaded, trainer)]
    small.assert_same_history(*histories)
    small.assert_same_state(state(loaded), state(trainer.model), 1e-5)


def test_one_replica_has_nothing_to_divide() -> None:
    assert sharded(1).describe() == "Mirrored over 1 replica on CPU:0"
    assert_same_bits(classifier(keras.optimizers.Adam), small.data(), 1)


def test_keras_own_fit_is_refused_with_sharded_state() -> None:
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), sharded(2), seed=0)
    trainer.build(small.data())
    with pytest.raises(ValueError, match=r"state is sharded, and Keras' own fit .* Train with tfpar.fit"):
        keras.Model.fit(trainer.model, small.data().take(2), verbose=0)
    tfpar.Trainer(lambda: trainer.model, tfpar.SingleDevice("CPU:0")).fit(small.data().take(2), verbose=0)
    trainer.model.fit(small.data().take(2), verbose=0)  # on one device again


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="shard must be 'optimizer', 'weights' or None, received 'gradients'"):
        tfpar.Mirrored(DEVICES, shard="gradients")  # type: ignore[arg-type]


def test_an_argument_without_effect_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"each gradient is summed .* and pack_bytes=100 would have no effect\. Leave it"
    ):
        tfpar.Mirrored(DEVICES, shard="optimizer", pack_bytes=100)
    with pytest.raises(ValueError, match=r"all_reduce='nccl' and pack_bytes=8 would have no effect\. Leave them out"):
        tfpar.Mirrored(DEVICES, shard="optimizer", all_reduce="nccl", pack_bytes=8)


def test_each_gradient_is_summed_on_the_owner_alone() -> None:
    """No sum is copied to other devices: they receive the new weights instead."""
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), sharded(2), seed=0)
    trainer.build(small.data())
    strategy, model = trainer.strategy, trainer.model
    element = next(iter(strategy.distribute(small.data()).dataset))[:-1]  # without the digest
    graph = tf.function(lambda: strategy.train_step(model, element)).get_concrete_function().graph
    sums = [op for op in graph.get_operations() if op.type in ("AddN", "AddV2") and op.outputs[0].shape.rank == 2]
    owners = {tuple(op.outputs[0].shape): op.device[-5:] for op in sums}
    kernels = [weight for weight in model.trainable_variables if len(weight.shape) == 2]
    assert len(kernels) == 3
    for kernel in kernels:
        slot = next(one for one in slots(model) if one.shape == kernel.shape)
        assert owners[tuple(kernel.shape)] == slot.value.device[-5:]
