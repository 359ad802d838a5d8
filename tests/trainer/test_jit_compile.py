"""XLA compiles a step only where the user asks for it, on machines with GPUs too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small

STRATEGIES = {**small.STRATEGIES, **small.SPLITTING_STRATEGIES}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
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


def test_keras_alone_would_compile_by_itself() -> None:
    assert model_compiled_with().jit_compile


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_a_model_that_asks_for_it_is_compiled_by_xla(strategy: str) -> None:
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
