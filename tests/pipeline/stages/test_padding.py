"""A pipeline whose stages XLA compiles: one device's results from micro-batches that are padded to one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_EXAMPLES, BATCH_SIZE = 25, 10  # micro-batches of 3, 3, 2, 2 examples, and of 2, 1, 1, 1 in the last batch


class Doubled(keras.layers.Layer):
    """Twice as many rows as examples, between two layers."""

    def call(self, features: Any) -> Any:
        return keras.ops.reshape(features, (-1, features.shape[1] // 2))


class Joined(keras.layers.Layer):
    def call(self, features: Any) -> Any:
        return keras.ops.reshape(features, (-1, features.shape[1] * 2))


class AddsPerRow(keras.optimizers.SGD):
    """Counts the listed rows of a gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient.values + 0.01, gradient.indices, gradient.dense_shape)
        super().update_step(gradient, variable, learning_rate)


def words(optimizer: Callable[[], Any]) -> Callable[..., keras.Model]:
    """Tokens of which zeros are masked, with a loss over the others."""

    def build(**compiled: Any) -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(11, 4, mask_zero=True)(tokens)
        hidden = keras.layers.Dense(4, "tanh")(hidden)
        model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"], **compiled)
        return model

    return build


def word_data() -> tf.data.Dataset:
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 11, size=(NUM_EXAMPLES, 6))
    targets = generator.normal(size=(NUM_EXAMPLES, 6, 2)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((tokens, targets)).batch(BATCH_SIZE)


def data() -> tf.data.Dataset:
    weights = np.random.default_rng(7).uniform(0.5, 2.0, NUM_EXAMPLES).astype("float32")
    return parity_cases.batches(NUM_EXAMPLES, BATCH_SIZE, weights)


def classifier(layers: Callable[[], list[Any]] = list) -> Callable[..., keras.Model]:
    def build(**compiled: Any) -> keras.Model:
        adam = lambda: keras.optimizers.Adam(0.05)  # noqa: E731
        metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        return parity_cases.classifier(adam, layers=layers, weighted_metrics=[metric], **compiled)()

    return build


def pipeline(num_replicas: int = 1, **settings: Any) -> tfpar.Strategy:
    one = tfpar.Pipeline(**{"num_stages": 2, "num_microbatches": 4, "balance": "parameters", **settings})
    return one if num_replicas == 1 else tfpar.Hybrid(one, num_replicas)


def with_losses() -> list[Any]:
    return [parity_cases.AddsLoss(), keras.layers.ActivityRegularization(0.1)]


CASES: dict[str, tuple[Callable[..., keras.Model], Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "sample weights": (classifier(), data, {}),
    "recomputed": (classifier(), data, {"recompute": True, "schedule": "zero_bubble"}),
    "replicas of stages": (classifier(), data, {"num_replicas": 2}),
    "one micro-batch": (classifier(), data, {"num_microbatches": 1}),
    "masks and lookups": (words(lambda: keras.optimizers.Adam(0.1)), word_data, {}),
    "an optimizer that sees the listed rows": (words(lambda: AddsPerRow(0.1)), word_data, {}),
    "added losses": (classifier(with_losses), data, {}),
    "two rows for each example": (classifier(lambda: [Doubled(), Joined()]), data, {"balance": [2, 2]}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_padded_micro_batches_train_as_one_device(name: str) -> None:
    build, dataset, settings = CASES[name]
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(dataset(), epochs=2, verbose=0).history
    trainer = tfpar.Trainer(lambda: build(jit_compile=True), pipeline(**settings), seed=0)
    small.assert_same_history(trainer.fit(dataset(), epochs=2, verbose=0).history, expected)
    small.assert_same_state(small.state(trainer.model), small.state(model), 1e-5)
    evaluated, wanted = (one.evaluate(dataset(), verbose=0, return_dict=True) for one in (trainer, model))
    small.assert_same_history({k: [v] for k, v in evaluated.items()}, {k: [v] for k, v in wanted.items()})
    inputs = dataset().map(lambda x, *others: x)
    small.assert_same_state(*([one.predict(inputs, verbose=0)] for one in (trainer, model)), tolerance=1e-5)
