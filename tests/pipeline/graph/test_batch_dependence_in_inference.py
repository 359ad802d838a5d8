"""Layers that are batch-dependent in training only, or in inference only: fit, evaluate and predict differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar
from tests.strategies.test_batch_dependence_replicas import with_layer
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=TWO, balance="parameters"),
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Centred(layers.Layer):
    """A layer that subtracts the mean of the batch, in training only or in inference only."""

    def __init__(self, in_training: bool) -> None:
        super().__init__(name="centred")
        self.in_training = in_training

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs - ops.mean(inputs, axis=0) if bool(training) == self.in_training else inputs


class Normalized(layers.Layer):
    """A layer with statistics of the batch in training and in inference, as in generators of images."""

    def __init__(self, synchronized: bool = False) -> None:
        super().__init__(name="centred")
        self.inner = layers.BatchNormalization(synchronized=synchronized)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs, training=True)


class OwnCall(keras.Model):
    """A model with a `call` that is batch-dependent in inference."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.dense = layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = self.dense(inputs)
        return outputs if training else outputs - ops.mean(outputs, axis=0)


def own_call() -> keras.Model:
    model = OwnCall()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


in_training, in_inference = (with_layer(lambda x, when=when: Centred(when)(x)) for when in (True, False))
always_normalized = with_layer(lambda x: Normalized()(x))
INPUTS = parity_cases.inputs(73)


def refused(name: str = "centred") -> Any:
    return pytest.raises(ValueError, match=f"received '{name}' in inference, where an example depends on the others")


def of_keras(build: Callable[[], keras.Model], **fit: Any) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(0)
    model = build()
    return model, model.fit(small.data(), verbose=0, **fit).history


@each_strategy
@pytest.mark.parametrize("build", [in_inference, always_normalized], ids=["own layer", "normalized"])
def test_dependence_in_inference_is_refused_in_evaluate_and_predict(
    build: Callable[[], keras.Model], strategy: str
) -> None:
    trainer = tfpar.Trainer(build, STRATEGIES[strategy]())
    with refused():
        trainer.predict(INPUTS, 8, verbose=0)
    with refused():
        trainer.evaluate(small.data(), verbose=0)
    with refused():
        trainer.fit(small.data(), validation_data=small.data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0


@each_strategy
def test_dependence_in_inference_trains_as_one_device(strategy: str) -> None:
    trainer = tfpar.Trainer(in_inference, STRATEGIES[strategy](), seed=0)
    model, expected = of_keras(in_inference)
    small.assert_same_history(trainer.fit(small.data(), verbose=0).history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)
    for call in (lambda: trainer.predict(INPUTS, 8, verbose=0), lambda: trainer.evaluate(small.data(), verbose=0)):
        with refused():
            call()


@each_strategy
def test_dependence_in_training_evaluates_and_predicts_as_one_device_and_is_refused_in_fit(strategy: str) -> None:
    trainer = tfpar.Trainer(in_training, STRATEGIES[strategy](), seed=0)
    keras.utils.set_random_seed(0)
    model = in_training()
    np.testing.assert_allclose(
        trainer.evaluate(small.data(), verbose=0), model.evaluate(small.data(), verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        trainer.predict(INPUTS, 8, verbose=0), model.predict(INPUTS, 8, verbose=0), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="received 'centred', where an example depends on the others of its batch"):
        trainer.fit(small.data(), verbose=0)


def test_a_custom_call_with_dependence_in_inference_trains_as_one_device() -> None:
    trainer = tfpar.Trainer(own_call, STRATEGIES["mirrored"](), seed=0)
    _, expected = of_keras(own_call)
    small.assert_same_history(trainer.fit(small.data(), verbose=0).history, expected)
    with refused("own"):
        trainer.evaluate(small.data(), verbose=0)
    with refused("own"):
        trainer.predict(INPUTS, 8, verbose=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("build", [in_training, in_inference, own_call], ids=["training", "inference", "own call"])
def test_dependence_in_one_mode_is_gathered_and_equals_one_device(build: Callable[[], keras.Model]) -> None:
    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO, batch_dependent_layers="gather"), seed=0)
    model, expected = of_keras(build, validation_data=small.data())
    history = trainer.fit(small.data(), validation_data=small.data(), verbose=0).history
    small.assert_same_history(history, expected)
    np.testing.assert_allclose(
        trainer.predict(INPUTS, 8, verbose=0), model.predict(INPUTS, 8, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_synchronized_or_gathered_statistics_in_inference_equal_one_device() -> None:
    synchronized = with_layer(lambda x: Normalized(synchronized=True)(x))
    for build, handling in ((synchronized, "refuse"), (always_normalized, "gather")):
        keras.utils.set_random_seed(0)
        expected = build().predict(INPUTS, batch_size=8, verbose=0)
        strategy = tfpar.Mirrored(TWO, batch_dependent_layers=handling)  # type: ignore[arg-type]
        found = tfpar.Trainer(build, strategy, seed=0).predict(INPUTS, 8, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_microbatch_and_allowed_dependence_infer() -> None:
    keras.utils.set_random_seed(0)
    expected = in_inference().predict(INPUTS, batch_size=8, verbose=0)
    one = tfpar.Pipeline(2, 1, devices=TWO, balance="parameters")
    np.testing.assert_allclose(
        tfpar.Trainer(in_inference, one, seed=0).predict(INPUTS, 8, verbose=0), expected, rtol=1e-5, atol=1e-6
    )
    allowed = tfpar.Pipeline(2, 2, devices=TWO, balance="parameters", allow_batch_dependent_layers=True)
    found = tfpar.Trainer(in_inference, allowed, seed=0).predict(INPUTS, 8, verbose=0)
    assert np.abs(found - expected).max() > 1e-3
