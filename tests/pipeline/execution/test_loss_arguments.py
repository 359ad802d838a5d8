"""The device of the last stage receives the inputs of the model only if the user's own loss or metrics take them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases

pytestmark = pytest.mark.usefixtures("logical_cpus")
FEATURES = parity_cases.inputs(8).shape[1:]


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        weights = 1.0 + keras.ops.mean(keras.ops.abs(keras.ops.reshape(x, [keras.ops.shape(x)[0], -1])), axis=1)
        return super().compute_loss(y=y, y_pred=y_pred, sample_weight=weights)


class OwnMetrics(keras.Model):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        return super().compute_metrics(x, y, y_pred, keras.ops.mean(keras.ops.abs(x), axis=-1))


@pytest.mark.parametrize("kind", [keras.Model, OwnLoss, OwnMetrics])
def test_the_loss_and_the_metrics_take_the_inputs_of_models_that_do(kind: type[keras.Model]) -> None:
    def build() -> keras.Model:
        inputs = keras.Input(FEATURES)
        hidden = keras.layers.Dense(5, "tanh")(keras.layers.Flatten()(inputs))
        model = kind(inputs, keras.layers.Dense(3)(hidden))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    strategy = tfpar.Pipeline(2, 2, balance="parameters", devices=["CPU:0", "CPU:1"])
    trainer = tfpar.Trainer(build, strategy, seed=0)
    dataset = tf.data.Dataset.from_tensor_slices((parity_cases.inputs(12), np.arange(12) % 3)).batch(8)
    trainer.fit(dataset, verbose=0)
    compiler = strategy._steps[trainer.model].compiler
    (compiled,) = compiler.compile_replicas(next(iter(dataset)), training=True)
    for function in (compiled.loss.function.concrete, compiled.metrics.function.concrete):
        takes = any(tuple(tensor.shape[1:]) == FEATURES for tensor in function.inputs if tensor.dtype == tf.float32)
        assert takes == (kind is not keras.Model)

    keras.utils.set_random_seed(0)
    model = build()
    model.fit(dataset, verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
