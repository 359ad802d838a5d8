"""Replicas of a model that XLA compiles: one device's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_EXAMPLES, BATCH_SIZE = 25, 10  # parts of 5 examples, and of 3 and 2 in the last batch


class Centered(keras.layers.Layer):
    """Subtracts the mean of the whole batch, for which the replicas communicate."""

    def call(self, features: Any) -> Any:
        return features - keras.ops.mean(tfpar.gather(features), axis=0)


@keras.saving.register_keras_serializable()
class RemembersOutputs(keras.Model):
    """Its loss reads a tensor that its call has stored."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        self.seen = super().call(inputs, training=training)
        return self.seen

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **settings: Any) -> Any:
        return super().compute_loss(x, y, y_pred, *others, **settings) + keras.ops.mean(self.seen**2)


def remembers_outputs(**compiled: Any) -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,))
    model = RemembersOutputs(features, keras.layers.Dense(1, "sigmoid")(features))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", **compiled)
    return model


def masked(**compiled: Any) -> keras.Model:
    """Steps of a sequence that are zero count neither in the loss nor in its divisor."""
    sequences = keras.Input((6, 2))
    hidden = keras.layers.Dense(4, "tanh")(keras.layers.Masking()(sequences))
    model = keras.Model(sequences, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **compiled)
    return model


def masked_data() -> tf.data.Dataset:
    generator = np.random.default_rng(3)
    sequences = generator.normal(size=(NUM_EXAMPLES, 6, 2)) * generator.integers(0, 2, size=(NUM_EXAMPLES, 6, 1))
    targets = generator.normal(size=(NUM_EXAMPLES, 6, 2))
    arrays = (sequences.astype("float32"), targets.astype("float32"))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


def recurrent(**compiled: Any) -> keras.Model:
    """A loop, whose backward pass reads the lists of its forward pass."""
    model = keras.Sequential([keras.Input((6, 2)), keras.layers.GRU(4, return_sequences=True), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **compiled)
    return model


class WithPositions(keras.layers.Layer):
    """Two lookups of one weight: the rows of the tokens, and the same six rows for every example."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(11, 4))

    def call(self, tokens: Any) -> Any:
        return tf.gather(self.rows, tokens) + tf.gather(self.rows, tf.range(6))


def words(lookup: Callable[[], keras.Layer]) -> Callable[..., keras.Model]:
    def build(**compiled: Any) -> keras.Model:
        layers = [lookup(), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adam(0.1), "mse", **compiled)
        return model

    return build


def word_data() -> tf.data.Dataset:
    generator = np.random.default_rng(3)
    arrays = (generator.integers(0, 11, size=(NUM_EXAMPLES, 6)), generator.normal(size=(NUM_EXAMPLES, 2)))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


def classifier(layers: Callable[[], list[Any]] = list) -> Callable[..., keras.Model]:
    def build(**compiled: Any) -> keras.Model:
        metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        settings = {"layers": layers, "weighted_metrics": [metric], **compiled}
        return parity_cases.classifier(lambda: keras.optimizers.Adam(0.05), **settings)()

    return build


def data() -> tf.data.Dataset:
    weights = np.random.default_rng(7).uniform(0.5, 2.0, NUM_EXAMPLES).astype("float32")
    return parity_cases.batches(NUM_EXAMPLES, BATCH_SIZE, weights)


def unweighted() -> tf.data.Dataset:
    return parity_cases.batches(NUM_EXAMPLES, BATCH_SIZE)


CASES: dict[str, tuple[Callable[..., keras.Model], Callable[[], tf.data.Dataset]]] = {
    "sample weights": (classifier(), data),
    "masks": (masked, masked_data),
    "loops": (recurrent, masked_data),
    "a lookup": (words(lambda: keras.layers.Embedding(11, 4)), word_data),
    "two lookups of one weight": (words(WithPositions), word_data),
    "synchronized": (classifier(lambda: [keras.layers.BatchNormalization(synchronized=True)]), data),
    "gathered": (classifier(lambda: [Centered()]), data),
    "added losses": (classifier(lambda: [parity_cases.AddsLoss()]), data),
    "a loss and a metric in call": (classifier(lambda: [parity_cases.CallsLoss()]), data),
    "a tensor stored by call": (remembers_outputs, lambda: unweighted().map(lambda x, y: (x, y[:, None] > 1))),
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", sampled(CASES, of_ci=["sample weights", "loops", "synchronized", "a loss and a metric in call"])
)
def test_replicas_compiled_by_xla_train_as_one_device(name: str) -> None:
    build, dataset = CASES[name]
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(dataset(), epochs=2, verbose=0).history
    trainer = tfpar.Trainer(lambda: build(jit_compile=True), tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=0)
    small.assert_same_history(trainer.fit(dataset(), epochs=2, verbose=0).history, expected)
    small.assert_same_state(small.state(trainer.model), small.state(model), 1e-5)
    evaluated, wanted = (one.evaluate(dataset(), verbose=0, return_dict=True) for one in (trainer, model))
    small.assert_same_history({k: [v] for k, v in evaluated.items()}, {k: [v] for k, v in wanted.items()})
    inputs = dataset().map(lambda x, *others: x)
    small.assert_same_state(*([one.predict(inputs, verbose=0)] for one in (trainer, model)), tolerance=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"], balance="parameters"),
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    ],
    ids=["stages", "sharded weights"],
)
def test_stages_with_loops_train_as_one_device_if_the_model_is_compiled_by_xla(strategy: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model = recurrent()
    expected = model.fit(masked_data(), epochs=2, verbose=0).history
    trainer = tfpar.Trainer(lambda: recurrent(jit_compile=True), strategy(), seed=0)
    small.assert_same_history(trainer.fit(masked_data(), epochs=2, verbose=0).history, expected)
    small.assert_same_state(small.state(trainer.model), small.state(model), 1e-5)


class Draws(keras.layers.Layer):
    """Writes one random number for each step and replica into its gradient."""

    def build(self, shape: Any) -> None:
        self.seeds = keras.random.SeedGenerator(3)
        self.sums = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, features: Any) -> Any:
        drawn = keras.random.uniform(keras.ops.shape(features), seed=self.seeds)
        return features + drawn * self.sums


@pytest.mark.extended
def test_random_numbers_differ_between_replicas_and_steps_and_are_repeatable() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), Draws()])
        model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: keras.ops.sum(outputs * y, -1), jit_compile=True)
        return model

    def drawn(signs: list[float]) -> list[float]:
        """The changes of the weight by each step: the mean of the signed numbers of both replicas."""
        trainer, found = tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=0), [0.0]
        for _ in range(3):
            trainer.fit(np.zeros((2, 1), "float32"), np.array(signs, "float32")[:, None], batch_size=2, verbose=0)
            found.append(trainer.model.layers[0].sums.numpy().item())
        return [float(one) for one in np.diff(found)]

    differences = drawn([1.0, -1.0])  # zero where both replicas draw the same number
    assert min(map(abs, differences)) > 1e-4
    assert len({round(one, 5) for one in differences}) == 3
    assert differences == drawn([1.0, -1.0])
