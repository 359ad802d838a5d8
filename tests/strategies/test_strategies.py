"""The properties of each strategy: devices, description, Dropout masks, statistics, and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_strategy_describes_its_devices() -> None:
    assert tfpar.SingleDevice("CPU:1").describe() == "SingleDevice on CPU:1"
    assert tfpar.Mirrored(TWO).describe() == "Mirrored over 2 replicas on CPU:0, CPU:1"
    shares = tfpar.Mirrored(TWO, batch_shares=[6, 2]).describe()
    assert shares == "Mirrored over 2 replicas on CPU:0, CPU:1, batch shares 3 : 1"
    assert tfpar.SingleDevice().num_replicas == 1
    assert tfpar.Mirrored(TWO).num_replicas == 2


def test_only_a_pipeline_has_a_schedule_to_trace() -> None:
    assert tfpar.Pipeline(2, 8, devices=TWO).engine.scheduled
    assert tfpar.Mirrored(TWO).engine.scheduled is None
    with pytest.raises(ValueError, match="Only a pipeline has a schedule to trace, and the strategy is SingleDevice"):
        tfpar.SingleDevice("CPU:0").trace(small.build_model(), None)


@pytest.mark.parametrize("shard", [None, "optimizer", "weights"])
def test_mirrored_takes_the_first_devices(shard: Any) -> None:
    """As the rows of a plan name it."""
    assert tfpar.Mirrored(3, shard=shard).device_names == ["CPU:0", "CPU:1", "CPU:2"]


def test_mirrored_takes_all_logical_cpus_where_there_is_no_gpu() -> None:
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("it takes the GPUs")
    assert tfpar.Mirrored().devices == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@pytest.mark.parametrize("name", ["CPU:1", "/device:CPU:1", "/CPU:1", "cpu:1"])
def test_a_device_may_be_written_as_tensorflow_does(name: str) -> None:
    assert tfpar.Mirrored([name]).describe() == "Mirrored over 1 replica on CPU:1"
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(name))
    assert trainer.model.weights[0].value.device.endswith("device:CPU:1")


def test_logical_cpus_cannot_be_changed_once_tensorflow_runs() -> None:
    tf.constant(1)
    tfpar.use_logical_cpus(4)  # as it is: no error
    with pytest.raises(RuntimeError, match=r"use_logical_cpus\(2\) must come before .* already runs with 4 CPU"):
        tfpar.use_logical_cpus(2)


def test_logical_cpus_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_devices must be at least 1, received 0"):
        tfpar.use_logical_cpus(0)


# --- several models ---------------------------------------------------------------------------------------------------


# --- replicas without examples ----------------------------------------------------------------------------------------


def convolutional() -> keras.Model:
    """Convolutions of every kind, pooling, normalization, attention and recurrence."""
    images = keras.Input((8, 8, 2))
    hidden = keras.layers.Conv2D(4, 3, activation="relu")(images)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    hidden = keras.layers.SeparableConv2D(5, 3, padding="same")(hidden)
    hidden = keras.layers.MaxPooling2D()(keras.layers.DepthwiseConv2D(2, padding="same")(hidden))
    hidden = keras.layers.LayerNormalization()(keras.layers.Reshape((9, 5))(hidden))
    hidden = keras.layers.MultiHeadAttention(2, 3)(hidden, hidden)
    hidden = keras.layers.GRU(4)(hidden)
    model = keras.Model(images, keras.layers.Dense(2)(hidden))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_a_last_batch_smaller_than_the_replicas_equals_one_device_through_every_kind_of_layer() -> None:
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(9, 8, 8, 2)).astype("float32"), rng.normal(size=(9, 2)).astype("float32"))
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
    keras.utils.set_random_seed(0)
    model = convolutional()
    expected = model.fit(dataset, verbose=0).history
    trainer = tfpar.Trainer(convolutional, tfpar.Mirrored(TWO), seed=0)
    small.assert_same_history(trainer.fit(dataset, verbose=0).history, expected, 1e-4)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_of_a_static_size_below_the_replicas_equal_one_device(batch_size: int) -> None:
    dataset = parity_cases.batches(6, batch_size, drop_remainder=True)
    keras.utils.set_random_seed(0)
    model = small.build_model()
    expected = model.fit(dataset, verbose=0).history
    trainer = tfpar.Trainer(small.build_model, tfpar.Mirrored([*TWO, "CPU:2"]), seed=0)
    small.assert_same_history(trainer.fit(dataset, verbose=0).history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)


@pytest.mark.extended
def test_sparse_inputs_equal_one_device() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    features = tf.sparse.from_dense(np.maximum(parity_cases.inputs(13), 0))
    dataset = tf.data.Dataset.from_tensor_slices((features, parity_cases.labels(13))).batch(4)
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(dataset, verbose=0).history
    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO), seed=0)
    small.assert_same_history(trainer.fit(dataset, verbose=0).history, expected)


# --- order within a step ----------------------------------------------------------------------------------------------


class AddsLinearLoss(keras.layers.Layer):
    """Adds a loss linear in its weight, whose gradient does not need the weight's value."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

    def call(self, features: Any) -> Any:
        self.add_loss(0.1 * keras.ops.sum(self.scale) * keras.ops.mean(keras.ops.square(features)))
        return features


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_every_weight_is_read_before_it_is_updated(strategy: str) -> None:
    """TensorFlow's graph optimizer can drop the edge that keeps a read before an update, from Keras' own `fit` too."""
    build, full = parity_cases.classifier(layers=lambda: [AddsLinearLoss()]), parity_cases.batches(72, 8)
    keras.utils.set_random_seed(0)
    model = build()
    model.run_eagerly = True
    expected = model.fit(full, epochs=2, verbose=0).history
    trainer = tfpar.Trainer(build, small.STRATEGIES[strategy](), seed=0)
    again = small.Again(trainer.model)
    for _ in range(4):
        again.reset()
        small.assert_same_history(trainer.fit(full, epochs=2, verbose=0).history, expected)
        small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)


# --- random numbers and statistics of each replica --------------------------------------------------------------------


class Remembers(keras.layers.Layer):
    """Stores the last masks of a Dropout before it, those of all replicas.

    Args:
        num_examples: The examples of a global batch.
    """

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.num_examples = num_examples

    def build(self, shape: Any) -> None:
        shape = (self.num_examples, shape[-1])
        self.seen = self.add_weight(shape=shape, initializer="zeros", trainable=False, name="seen")

    def call(self, features: Any, training: bool = False) -> Any:
        if training:  # a strategy may try the model on fewer examples
            rows = tfpar.gather(features)
            self.seen.assign(tf.concat([rows, tf.zeros_like(self.seen)], 0)[: self.num_examples])
        return features


def masks(strategy: tfpar.Strategy, num_steps: int) -> np.ndarray:
    """Masks `[replicas, examples of a replica, units]` of the last of `num_steps` steps."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5, seed=3)])
        model.add(Remembers(4 * strategy.num_replicas))
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    trainer = tfpar.Trainer(build, strategy, seed=0)
    ones = np.ones((4 * strategy.num_replicas * num_steps, 32), "float32")
    trainer.fit(ones, ones[:, :1], batch_size=4 * strategy.num_replicas, verbose=0)
    return trainer.model.layers[1].seen.numpy().reshape(strategy.num_replicas, 4, 32)  # type: ignore[no-any-return]


def test_every_replica_drops_other_units() -> None:
    first, second = masks(tfpar.Mirrored(TWO), 1)
    assert set(np.unique(first)) == set(np.unique(second)) == {0.0, 2.0}
    share_equal = (first == second).mean()
    assert 0.3 < share_equal < 0.7, f"independent masks agree in half of all places, these in {share_equal:.2f}"
    assert len({row.tobytes() for row in (*first, *second)}) == 8, "every example has a mask of its own"


def test_masks_differ_from_step_to_step_and_not_from_run_to_run() -> None:
    strategy = tfpar.Mirrored(TWO)
    one, two = masks(strategy, 1), masks(strategy, 2)
    assert not np.array_equal(one, two)
    assert not np.array_equal(one[0], two[1]), "no replica repeats what another drew a step before"
    np.testing.assert_array_equal(masks(strategy, 2), two)


def normalized() -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(scope="module")
def normalizing(logical_cpus: list[str]) -> Callable[[], tfpar.Trainer]:
    trainer = tfpar.Trainer(normalized, tfpar.Mirrored(TWO), seed=0)
    again = small.Again(trainer.model)

    def reset() -> tfpar.Trainer:
        again.reset()
        return trainer

    return reset


@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
def test_moving_statistics_are_the_mean_of_those_of_the_replicas(
    normalizing: Callable[[], tfpar.Trainer], steps_per_call: int
) -> None:
    """Batches of 7: the first replica takes 4 examples, the second 3."""
    features = parity_cases.inputs(35)
    mean, variance = np.zeros(5), np.ones(5)
    for batch in features.reshape(5, 7, 5):
        replicas = (batch[:4], batch[4:])
        mean = 0.9 * mean + 0.1 * np.mean([part.mean(0) for part in replicas], 0)
        variance = 0.9 * variance + 0.1 * np.mean([part.var(0) for part in replicas], 0)
    trainer = normalizing()
    trainer.fit(parity_cases.batches(35, 7), verbose=0, steps_per_call=steps_per_call, callbacks=[tfpar.ReplicaCheck()])
    layer = trainer.model.layers[0]
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4)


def test_a_batch_smaller_than_the_replicas_gives_each_the_statistics_of_all_of_it(
    normalizing: Callable[[], tfpar.Trainer],
) -> None:
    """The first batch of a training, and the last of an epoch."""
    features = parity_cases.inputs(9)
    for size, num_examples in ((1, 1), (8, 9)):
        trainer = normalizing()
        trainer.fit(parity_cases.batches(num_examples, size), verbose=0)
        mean, variance = np.zeros(5), np.ones(5)
        for start in range(0, num_examples, size):
            batch = features[:num_examples][start : start + size]
            replicas = (batch, batch) if len(batch) < 2 else np.split(batch, 2)
            mean = 0.9 * mean + 0.1 * np.mean([part.mean(0) for part in replicas], 0)
            variance = 0.9 * variance + 0.1 * np.mean([part.var(0) for part in replicas], 0)
        layer = trainer.model.layers[0]
        np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4)
        assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())


@pytest.mark.extended
def test_evaluation_and_prediction_take_batches_of_any_size(normalizing: Callable[[], tfpar.Trainer]) -> None:
    """They use the moving statistics, and do not update them."""
    trainer = tfpar.Trainer(normalized, tfpar.Mirrored(TWO), seed=0)
    keras.utils.set_random_seed(0)
    model = normalized()
    one = parity_cases.batches(1, 1)
    np.testing.assert_allclose(trainer.evaluate(one, verbose=0), model.evaluate(one, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(one, verbose=0), model.predict(one, verbose=0), rtol=1e-5)
    normalizing().fit(parity_cases.batches(8, 8), validation_data=parity_cases.batches(9, 8), verbose=0)


@pytest.mark.parametrize("in_scope", [False, True], ids=["outside", "in the scope"])
def test_python_and_numpy_convert_variables_of_replicas(in_scope: bool) -> None:
    trainer = tfpar.Trainer(small.build_model, tfpar.Mirrored(TWO))
    optimizer = trainer.model.optimizer
    optimizer.iterations.assign(7)
    rate = optimizer.learning_rate.numpy()
    with trainer.strategy.scope() if in_scope else contextlib.nullcontext():
        assert (int(optimizer.iterations), float(optimizer.learning_rate)) == (7, float(rate))
        assert (int(optimizer.iterations.value), float(optimizer.learning_rate.value)) == (7, float(rate))
        for array in (np.array(optimizer.learning_rate), keras.ops.convert_to_numpy(optimizer.learning_rate.value)):
            np.testing.assert_array_equal(array, rate)


# Random numbers drawn without a seed in a layer's call: different on every replica, and repeatable


class Noise(layers.Layer):
    """Adds numbers of Keras' global generator."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs))


def build() -> keras.Model:
    features = keras.Input((5,))
    model = keras.Model(features, layers.Dense(1)(Noise()(features)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.extended
def test_draws_without_a_seed_are_repeatable() -> None:
    keras.random.normal((2,))  # the global generator is there before, outside of any scope
    inputs = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
    weights = []
    for _ in range(2):
        trainer = tfpar.Trainer(build, small.STRATEGIES["mirrored"](), seed=0)
        losses = trainer.fit(inputs, inputs[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
        weights.append(trainer.model.get_weights())
    assert len(set(losses)) == 2
    small.assert_same_state(*weights)


def test_the_generator_continues_from_its_state() -> None:
    keras.utils.set_random_seed(3)
    keras.random.normal((2,))
    expected = np.asarray(keras.random.normal((2,)))
    keras.utils.set_random_seed(3)
    keras.random.normal((2,))
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES["mirrored"](), seed=None)
    trainer.fit(small.data(), verbose=0)
    np.testing.assert_array_equal(np.asarray(keras.random.normal((2,))), expected)
