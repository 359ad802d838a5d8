"""XLA compiles where the user asks for it, and with `jit_compile="auto"` on GPUs, until it cannot."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tfpar import xla_choice
from tfpar._compat import tf_determinism
from tfpar._compat.models import keras_model
from tfpar.engines.steps import launched_steps

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {**small.STRATEGIES, **small.SPLITTING_STRATEGIES}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture
def machine_with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras resolves `jit_compile="auto"` by the list of all physical devices."""
    devices = tf.config.list_physical_devices

    def listed(device_type: str | None = None) -> list[Any]:
        return [*devices(device_type), *[SimpleNamespace(device_type="GPU")] * (device_type is None)]

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)


def model_compiled_with(**settings: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile("sgd", LOSS, **settings)
    return model


def test_keras_alone_would_compile_by_itself(machine_with_gpu: None) -> None:
    assert model_compiled_with().jit_compile


@pytest.mark.usefixtures("machine_with_gpu")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_cpus_only_a_model_that_asks_for_it_is_compiled_by_xla(strategy: str) -> None:
    trainer = tfpar.Trainer(model_compiled_with, STRATEGIES[strategy]())
    assert not trainer.model.jit_compile
    trainer.compile("sgd", LOSS, jit_compile=True)
    assert trainer.model.jit_compile
    trainer.compile("sgd", LOSS)
    assert not trainer.model.jit_compile
    trainer = tfpar.Trainer(lambda: model_compiled_with(jit_compile=True), STRATEGIES[strategy]())
    assert trainer.model.jit_compile
    trainer.model.compile("sgd", LOSS)
    assert not trainer.model.jit_compile


@pytest.mark.usefixtures("machine_with_gpu")
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_a_model_that_xla_compiles_predicts_before_it_trains(strategy: str) -> None:
    inputs = np.random.default_rng(0).normal(size=(9, 4))
    keras.utils.set_random_seed(0)
    expected = model_compiled_with(jit_compile=False).predict(inputs, verbose=0)
    trainer = tfpar.Trainer(lambda: model_compiled_with(jit_compile=True), STRATEGIES[strategy](), seed=0)
    np.testing.assert_allclose(trainer.predict(inputs, verbose=0), expected, rtol=1e-5)


def test_a_built_model_is_not_compiled_by_xla_after_it_is_compiled_again() -> None:
    trainer = tfpar.Trainer(model_compiled_with(), tfpar.SingleDevice())
    trainer.model.compile("sgd", LOSS)
    assert not trainer.model.jit_compile


def test_xla_compiles_for_the_device_of_the_weights() -> None:
    """Otherwise it refuses to read weights of another device than the first."""
    trainer = tfpar.Trainer(lambda: model_compiled_with(jit_compile=True), tfpar.SingleDevice("CPU:2"), seed=0)
    inputs, labels = np.ones((8, 4), "float32"), np.zeros(8, "int32")
    expected = trainer.model.layers[1](trainer.model.layers[0](inputs))
    np.testing.assert_allclose(trainer.predict(inputs, verbose=0), expected, rtol=1e-5)
    trainer.fit(inputs, labels, verbose=0)
    assert trainer.evaluate(inputs, labels, verbose=0) > 0


# --- "auto" on GPUs, for which logical CPUs stand


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_choice, "is_default", lambda devices: True)
    monkeypatch.setattr(launched_steps, "suits", lambda devices: True)


@pytest.mark.few(1)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_gpus_auto_compiles_steps_that_train_as_one_device(strategy: str) -> None:
    strategies = []

    def noted() -> tfpar.Strategy:
        strategies.append(STRATEGIES[strategy]())
        return strategies[0]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not compiled with XLA")
        small.assert_trains_as_one_device(small.build_model, small.data, noted)
    trainer = tfpar.Trainer(small.build_model, strategies[0])
    assert keras_model.is_chosen(trainer.model)
    trainer.compile("sgd", LOSS, jit_compile=False)
    assert not trainer.model.jit_compile
    assert not tfpar.Trainer(trainer.model, tfpar.SingleDevice()).model.jit_compile


class WithoutXla(keras.layers.Layer):
    """As cuDNN's layers in Keras."""

    def __init__(self) -> None:
        super().__init__(name="of_cudnn")
        self.supports_jit = False

    def call(self, features: Any) -> Any:
        return features


class Texts(keras.layers.Layer):
    """Reads numbers as texts, which XLA has no operation for."""

    def call(self, features: Any) -> Any:
        lengths = tf.strings.length(tf.strings.as_string(tf.stop_gradient(features)))
        return features + 0.0 * tf.cast(lengths, features.dtype)


def with_texts(**settings: Any) -> Callable[[], keras.Model]:
    return parity_cases.classifier(layers=lambda: [Texts(), keras.layers.Dropout(0.0)], **settings)


AN_OPERATION = "it cannot compile AsString"
REASONS: dict[str, tuple[Callable[[], keras.Model], str]] = {
    "a layer": (parity_cases.classifier(layers=lambda: [WithoutXla()]), r"layer 'of_cudnn' \(WithoutXla\) does not"),
    "an operation": (with_texts(), AN_OPERATION),
    "an added loss": (
        parity_cases.classifier(layers=lambda: [parity_cases.AddsLoss()]),
        "a replica cannot run its forward",
    ),
}


@pytest.mark.few(1)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reason", REASONS)
def test_what_xla_cannot_compile_is_named_and_trains_as_one_device_without_it(reason: str, strategy: str) -> None:
    build, message = REASONS[reason]
    if reason == "an added loss" and strategy != "mirrored":
        pytest.skip("XLA compiles the whole step, or the passes of stages")
    with pytest.warns(UserWarning, match=f"are not compiled with XLA: {message}"):
        small.assert_trains_as_one_device(build, small.data, STRATEGIES[strategy])


@pytest.mark.usefixtures("gpus")
def test_deterministic_operations_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_determinism, "is_enabled", lambda: True)
    with pytest.warns(UserWarning, match="not compiled with XLA: operations are deterministic"):
        assert not tfpar.Trainer(small.build_model, tfpar.SingleDevice()).model.jit_compile


@pytest.mark.few(1)
@pytest.mark.few(2)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_and_prediction_leave_xla_out_too(strategy: str, method: str) -> None:
    keras.utils.set_random_seed(0)
    expected = getattr(with_texts()(), method)(small.data(), verbose=0)
    trainer = tfpar.Trainer(with_texts(), STRATEGIES[strategy](), seed=0)
    with pytest.warns(UserWarning, match=AN_OPERATION):
        found = getattr(trainer, method)(small.data(), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_of_a_model_that_asks_for_xla_is_raised_and_no_weight_changes(strategy: str) -> None:
    trainer = tfpar.Trainer(with_texts(jit_compile=True), STRATEGIES[strategy](), seed=0)
    trainer.build(small.data())
    before = trainer.model.get_weights()
    with pytest.raises(tf.errors.OpError, match=re.compile("unsupported operations.*AsString", re.DOTALL)):
        trainer.fit(small.data(), verbose=0)
    small.assert_same_state(trainer.model.get_weights(), before)


@pytest.mark.usefixtures("gpus")
def test_an_error_of_a_step_that_xla_has_compiled_is_raised() -> None:
    inputs = tf.data.Dataset.from_tensor_slices((parity_cases.inputs(24), parity_cases.labels(24))).batch(8)
    failing = inputs.map(lambda x, y: (tf.debugging.check_numerics(x, "the third batch"), y))
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    trainer.fit(failing, verbose=0)
    assert trainer.model.jit_compile
