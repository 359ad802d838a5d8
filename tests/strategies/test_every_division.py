"""Every division of a batch or a model keeps Keras' precision, loss scales, and what it does without gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")

PAIR = ["CPU:0", "CPU:1"]
DIVISIONS: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": lambda: tfpar.SingleDevice(),
    "batch": lambda: tfpar.Mirrored(PAIR),
    "state": lambda: tfpar.Mirrored(PAIR, shard="optimizer"),
    "weights": lambda: tfpar.Mirrored(PAIR, shard="weights"),
    "layers": lambda: tfpar.TensorParallel(2),
    "stages": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    "stages of shards": lambda: tfpar.Pipeline(2, 2, balance="parameters", num_shards=2),
    "replicas of stages": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2, shard="optimizer"),
    "replicas of layers": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2, shard="optimizer"),
}
by_division = pytest.mark.parametrize("division", DIVISIONS)


@pytest.mark.few(1)
@pytest.mark.crossed
@by_division
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains_as_with_keras(division: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    tolerance = {"mixed_float16": 5e-3, "mixed_bfloat16": 3e-2}[policy]
    try:
        small.assert_trains_as_one_device(small.build_model, small.data, DIVISIONS[division], tolerance)
    finally:
        keras.config.set_dtype_policy("float32")


class Explodes(keras.layers.Layer):
    """Passes its inputs on; where a feature is large, the gradient of the step is not finite."""

    def call(self, features: Any) -> Any:
        @tf.custom_gradient
        def pass_on(values: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return tf.where(values > 100, tf.cast(float("inf"), upstream.dtype), upstream)

            return tf.identity(values), gradient

        return pass_on(features)


@pytest.mark.few(1)
@by_division
def test_a_step_whose_scaled_gradients_are_not_finite_is_skipped_and_the_scale_halved(division: str) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(6, "relu"), keras.layers.Dense(3)]
        shift = keras.layers.Dense(5, name="shift")
        model = keras.Sequential([keras.Input((5,)), shift, Explodes(), *hidden])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
        model.compile(optimizer, "mse")
        return model

    features = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
    features[17] = 1e4  # of the second batch
    targets = np.zeros((40, 3), "float32")
    model = build()
    model.fit(features, targets, batch_size=10, shuffle=False, verbose=0)
    trainer = tfpar.Trainer(build, DIVISIONS[division]())
    trainer.fit(features, targets, batch_size=10, shuffle=False, verbose=0)
    scale, steps = (float(model.optimizer.dynamic_scale), int(model.optimizer.iterations))
    assert (scale, steps) == (32.0, 3)
    assert (float(trainer.model.optimizer.dynamic_scale), int(trainer.model.optimizer.iterations)) == (scale, steps)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-4)


def without_gradient(labels: Any, outputs: Any) -> Any:
    return keras.ops.cast(keras.ops.argmax(outputs, -1), "float32")


@pytest.mark.few(2)
@by_division
def test_a_loss_without_any_gradient_is_refused_as_with_keras(division: str) -> None:
    trainer = tfpar.Trainer(parity_cases.classifier(loss=lambda: without_gradient), DIVISIONS[division](), seed=0)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        trainer.fit(small.data(), verbose=0)


def frozen() -> keras.Model:
    model = small.build_model()
    model.trainable = False
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.few(1)
@by_division
def test_a_model_without_trained_weights_is_named_and_measured_as_with_keras(division: str) -> None:
    with pytest.warns(UserWarning, match="does not have any trainable weights") as noted:
        small.assert_trains_as_one_device(frozen, small.data, DIVISIONS[division])
    assert sum("fit updates its metrics" in str(one.message) for one in noted) == 1


def served(path: Path, format: str, inputs: np.ndarray) -> np.ndarray:
    """Return the outputs of an exported model."""
    if format == "tf_saved_model":
        exported = tf.saved_model.load(path)
        return np.asarray(exported.serve(tf.constant(inputs)))
    if format == "litert":
        runner = tf.lite.Interpreter(str(path)).get_signature_runner()
        return next(iter(runner(**dict.fromkeys(runner.get_input_details(), inputs)).values()))
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: inputs})[0]


@pytest.mark.few(1)
@pytest.mark.crossed
@by_division
@pytest.mark.parametrize("format", ["tf_saved_model", "litert", "onnx"])
def test_an_exported_model_has_the_outputs_of_the_trained_one(division: str, format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("tf2onnx")
    trainer = tfpar.Trainer(small.build_model, DIVISIONS[division](), seed=0)
    trainer.fit(small.data(), verbose=0)
    inputs = parity_cases.inputs(8).astype("float32")
    state, outputs = small.state(trainer.model), trainer.predict(inputs, verbose=0)
    path = tmp_path / {"tf_saved_model": "exported", "litert": "model.tflite", "onnx": "model.onnx"}[format]
    trainer.export(path, format=format, verbose=False)
    np.testing.assert_allclose(served(path, format, inputs), outputs, rtol=1e-4, atol=1e-6)
    small.assert_same_state(small.state(trainer.model), state)
    trainer.fit(small.data(), verbose=0)  # on its devices again
    assert not np.array_equal(small.state(trainer.model)[0], state[0])
