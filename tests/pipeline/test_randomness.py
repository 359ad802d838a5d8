"""Statistics, states and random numbers of micro-batches and of steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES, inputs, labels
from tests.support.pipeline_models import TOLERANCE, crossentropy, labelled, sequential
from tests.support.small import assert_same_state, state

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_batch_normalization_takes_statistics_of_each_micro_batch_and_moves_averages_once_a_step() -> None:
    build = sequential(
        lambda: layers.Dense(8, use_bias=False),
        lambda: layers.BatchNormalization(momentum=0.9),
        lambda: layers.Activation("tanh"),
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        for features, targets in labelled():
            _step_by_hand(model, features, targets, num_microbatches=3)
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 3, "zero_bubble", "parameters", recompute=True), seed=0)
        trainer.fit(labelled(), verbose=0)
    assert_same_state(trainer.model.get_weights(), model.get_weights(), TOLERANCE)


def _step_by_hand(model: keras.Model, features: Any, targets: Any, num_microbatches: int) -> None:
    size, averages = len(features), model.non_trainable_variables
    before = [variable.numpy() for variable in averages]
    after, gradients = [0.0 * value for value in before], [0.0 for _ in model.trainable_variables]
    ends = [-(-number * size // num_microbatches) for number in range(num_microbatches + 1)]
    for begin, end in itertools.pairwise(ends):
        with tf.GradientTape() as tape:
            outputs = model(features[begin:end], training=True)
            loss = crossentropy()(targets[begin:end], outputs) * (end - begin) / size
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        gradients = [total + gradient for total, gradient in zip(gradients, found, strict=True)]
        for index, variable in enumerate(averages):
            after[index] += variable.numpy() * (end - begin) / size
            variable.assign(before[index])
    for variable, value in zip(averages, after, strict=True):
        variable.assign(value)
    model.optimizer.apply(gradients, model.trainable_variables)


class UniformNoise(layers.Layer):
    """Draws from Keras' generator of no layer, in training."""

    def call(self, features: Any, training: bool = False) -> Any:
        return features * keras.random.uniform(ops.shape(features)) if training else features


RANDOM = sequential(lambda: layers.Dropout(0.5), lambda: layers.Dense(8), UniformNoise)


def test_with_one_micro_batch_chance_is_that_of_one_device() -> None:
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = RANDOM()
        model.fit(labelled(), epochs=2, verbose=0)
        trainer = tfpar.Trainer(RANDOM, tfpar.Pipeline(3, 1, balance="parameters", recompute=True), seed=0)
        trainer.fit(labelled(), epochs=2, verbose=0)
    assert_same_state(state(trainer.model), state(model), TOLERANCE)


@pytest.mark.extended
def test_with_several_micro_batches_neither_recomputation_nor_the_schedule_changes_chance() -> None:
    states = []
    for schedule, recompute in (("1f1b", False), ("1f1b", True), ("zero_bubble", True)):
        trainer = tfpar.Trainer(RANDOM, tfpar.Pipeline(2, 4, schedule, [2, 3], recompute=recompute), seed=0)
        trainer.fit(labelled(), verbose=0)
        states.append(state(trainer.model))
    assert_same_state(states[1], states[0], 1e-6)
    assert_same_state(states[2], states[0], 1e-6)


def test_micro_batches_draw_masks_of_their_own() -> None:
    def build() -> keras.Model:
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((64,)), layers.Identity(), layers.Dropout(0.5), dense])
        model.compile(keras.optimizers.SGD(1.0), "mae")
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, balance=[1, 2]), seed=0)
    trainer.fit(np.ones((4, 64)), np.ones((4, 1)), batch_size=4, verbose=0)
    # Each weight grew by 2/4 for every micro-batch that kept its input; with one mask they would be 0 or 2.
    assert set(np.ravel(trainer.model.get_weights()[0])) == {0.0, 0.5, 1.0, 1.5, 2.0}


def test_random_operations_of_tensorflow_are_not_recomputed() -> None:
    def build() -> keras.Model:
        noise = layers.Lambda(lambda x: x * tf.random.uniform(tf.shape(x)))
        first = layers.EinsumDense("bi,i->bi", output_shape=64, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((64,)), first, noise, layers.Identity()])
        model.compile(keras.optimizers.SGD(1.0), "mae")
        return model

    tf.random.set_seed(None)
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance=[2, 1], recompute=True), seed=None)
    loss = trainer.fit(np.ones((4, 64)), np.zeros((4, 64)), batch_size=4, verbose=0).history["loss"]
    # The loss is the mean of the noise, and so is the gradient, summed over the weights.
    assert 1 - np.mean(trainer.model.get_weights()[0]) == pytest.approx(loss[0] / 64, rel=1e-4)


class AddsDrawnRow(layers.Layer):
    """Adds one row of a table to all examples that it sees together, drawn at random."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.table = layers.Embedding(1000, NUM_FEATURES, embeddings_initializer="zeros")
        self.generator = keras.random.SeedGenerator(0)

    def build(self, shape: Any) -> None:
        self.table.build(None)

    def call(self, features: Any) -> Any:
        return features + self.table(self.draw(self.generator))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: keras.random.randint((1,), 0, 1000, seed=generator),
        lambda generator: tf.random.uniform((1,), maxval=1000, dtype="int32", seed=0),
    ],
    ids=["Keras", "TensorFlow"],
)
def test_each_micro_batch_trains_the_row_that_it_drew(draw: Callable[[Any], Any]) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), AddsDrawnRow(draw), layers.Dense(NUM_CLASSES)])
        model.compile("sgd", crossentropy())
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, balance=[1, 1]), seed=0)
    trainer.fit(inputs(8), labels(8), batch_size=8, verbose=0)
    table = trainer.model.layers[0].table.embeddings.numpy()
    assert np.count_nonzero(np.any(table != 0, axis=1)) == 4
