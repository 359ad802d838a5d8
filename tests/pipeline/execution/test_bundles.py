"""The tensors of bundles in the operations that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.pipeline.execution.bundles import bundled, unbundle

BATCH = 8


def convolutions(*layers: Callable[..., Any]) -> Callable[[], keras.Model]:
    """Return a model function: layers in a row, each with a bias."""

    def build() -> keras.Model:
        given = keras.Input((8, 8, 4))
        hidden = given
        for layer in layers:
            hidden = layer(padding="same", activation="relu")(hidden)
        model = keras.Model(given, keras.layers.Dense(2)(keras.layers.Flatten()(hidden)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


def convolution(filters: int, kind: Any = keras.layers.Conv2D) -> Callable[..., Any]:
    return lambda **options: kind(filters, 3, **options)


def transposed(filters: int) -> Callable[..., Any]:
    return convolution(filters, keras.layers.Conv2DTranspose)


MODELS = {
    "one_width": convolutions(*[convolution(8), transposed(8)] * 3),
    "several_widths": convolutions(*[kind(4 + 2 * n) for n in range(3) for kind in (convolution, transposed)]),
    "convolutions_and_a_dense_layer": convolutions(*[convolution(8)] * 4),
}


@pytest.mark.parametrize("model", MODELS)
def test_each_bias_of_convolutions_has_its_own_gradient_in_float32(logical_cpus: list[str], model: str) -> None:
    """oneDNN took the gradient of another layer: biases differed by 10, or the step failed."""
    random = np.random.default_rng(0)
    examples = random.random([BATCH, 8, 8, 4], "float32"), random.random([BATCH, 2], "float32")
    weights = []
    pipeline = tfpar.Pipeline(2, 4, "zero_bubble", devices=logical_cpus[:2], balance="parameters")
    for strategy in (tfpar.SingleDevice(logical_cpus[0]), pipeline):
        trainer = tfpar.Trainer(MODELS[model], strategy, seed=0)
        trainer.fit(*examples, batch_size=BATCH, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for expected, found in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 256, 257, 600])
def test_a_bundle_of_any_size_returns_its_tensors(logical_cpus: list[str], count: int) -> None:
    tensors = [tf.constant([number], "float32") for number in range(count)] + [tf.constant([1], "int32")]
    devices = [logical_cpus[number % 300 == 299] for number in range(count)] + logical_cpus[:1]

    @tf.function
    def joined_and_taken_apart() -> list[tf.Tensor]:
        return unbundle(bundled(tensors, devices), tensors, devices)

    found = joined_and_taken_apart()
    assert [one.numpy().tolist() for one in found] == [one.numpy().tolist() for one in tensors]
    operations = joined_and_taken_apart.get_concrete_function().graph.get_operations()
    assert max((len(op.inputs) for op in operations if op.type == "OptionalFromValue"), default=0) <= 16
