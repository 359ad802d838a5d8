"""Sparse and ragged batches go through the stages of a pipeline in micro-batches, as they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES, inputs, labels
from tests.support.pipeline_models import (
    NUM_EXAMPLES,
    assert_pipeline_equals_one_device,
    batched,
    crossentropy,
    ragged_data,
    ragged_rows,
    random,
)

pytestmark = pytest.mark.usefixtures("logical_cpus")

WEIGHTS = np.linspace(0.1, 2, NUM_EXAMPLES)


def compiled(model: keras.Model) -> keras.Model:
    weighted = [keras.metrics.SparseCategoricalAccuracy(name="weighted")]
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"], weighted_metrics=weighted)
    return model


def mostly_zero() -> np.ndarray:
    """Some examples have no number but zeros."""
    return np.where(inputs(NUM_EXAMPLES) > 0.8, inputs(NUM_EXAMPLES), 0)


def rows() -> tf.SparseTensor:
    return tf.sparse.from_dense(mostly_zero())


class ScaledValues(layers.Layer):
    """Multiplies the values of a sparse tensor by a weight."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, features: Any) -> Any:
        return features.with_values(features.values * tf.convert_to_tensor(self.scale))

    def compute_output_spec(self, features: Any) -> Any:
        return keras.KerasTensor(features.shape, self.compute_dtype, sparse=True)


def sparse_input() -> keras.Model:
    features = keras.Input((NUM_FEATURES,), sparse=True)
    hidden = layers.Dense(4, "tanh")(layers.Dense(8, "tanh")(features))
    return compiled(keras.Model(features, layers.Dense(NUM_CLASSES)(hidden)))


def sparse_across_cuts() -> keras.Model:
    """Sparse tensors that a layer makes, and those of the input, are taken two stages later."""
    features, more = keras.Input((NUM_FEATURES,), sparse=True), keras.Input((NUM_FEATURES,))
    scaled = ScaledValues()(features)
    hidden = layers.Dense(4, "tanh")(more)
    wide = [layers.Dense(4)(scaled), layers.Dense(4)(features), hidden]
    return compiled(keras.Model([features, more], layers.Dense(NUM_CLASSES)(layers.Add()(wide))))


class OwnCall(keras.Model):
    """Declares no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.first, self.last = ScaledValues(), layers.Dense(4, "tanh"), layers.Dense(NUM_CLASSES)
        self.first.build((None, NUM_FEATURES))  # TensorFlow does not know the size of scaled rows

    def call(self, features: Any) -> Any:
        return self.last(self.first(self.scaled(features)))


def made_dense() -> keras.Model:
    features = keras.Input((NUM_FEATURES,))
    return compiled(keras.Model(features, layers.Dense(NUM_CLASSES)(layers.Dense(4, "tanh")(features))))


def weighted_ragged_data() -> tf.data.Dataset:
    weights = batched(WEIGHTS)
    return tf.data.Dataset.zip(ragged_data(), weights).map(lambda batch, weights: (*batch, weights[0]))


def with_weights(*arrays: Any) -> Callable[[], tf.data.Dataset]:
    return lambda: batched(*(array() for array in arrays), labels(NUM_EXAMPLES), WEIGHTS)


def two_inputs() -> tf.data.Dataset:
    return batched((rows(), random(NUM_FEATURES)), labels(NUM_EXAMPLES), WEIGHTS)


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "sparse input": (sparse_input, with_weights(rows), {"num_stages": 2, "balance": "time"}),
    "sparse across cuts": (sparse_across_cuts, two_inputs, {"num_stages": 4, "schedule": "zero_bubble"}),
    "sparse to a custom call": (lambda: compiled(OwnCall()), with_weights(rows), {"num_stages": 2}),
    "sparse made dense": (made_dense, with_weights(rows), {"num_stages": 2, "recompute": True}),
    "ragged with weights": (lambda: compiled(ragged_rows()), weighted_ragged_data, {"num_stages": 3}),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(" ", "_"))
def test_it_trains_evaluates_and_predicts_as_on_one_device(name: str) -> None:
    assert_pipeline_equals_one_device(*CASES[name])


def test_predict_returns_sparse_outputs_as_keras_does() -> None:
    def build() -> keras.Model:
        features = keras.Input((NUM_FEATURES,), sparse=True)
        model = keras.Model(features, ScaledValues()(ScaledValues()(features)))
        model.compile("sgd")
        return model

    found, wanted = (
        one.predict(rows(), batch_size=8, verbose=0)
        for one in (tfpar.Trainer(build, tfpar.Pipeline(2, 3, balance="parameters")), build())
    )
    np.testing.assert_allclose(tf.sparse.to_dense(found), tf.sparse.to_dense(wanted), rtol=1e-6)


class ScaledByBatch(ScaledValues):
    """Divides by the largest value of all examples."""

    def call(self, features: Any) -> Any:
        return features.with_values(features.values / tf.reduce_max(features.values))


def test_a_layer_that_mixes_the_examples_of_a_sparse_batch_is_refused() -> None:
    def build() -> keras.Model:
        features = keras.Input((NUM_FEATURES,), sparse=True)
        return compiled(keras.Model(features, layers.Dense(NUM_CLASSES)(ScaledByBatch(name="scaled")(features))))

    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
    with pytest.raises(ValueError, match="received 'scaled', where an example depends on the others"):
        trainer.fit(rows(), labels(NUM_EXAMPLES), batch_size=8, verbose=0)
