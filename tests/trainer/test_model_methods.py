"""The model's own `evaluate`, `predict` and methods for single batches, as callbacks call them, equal one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

CPUS = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    **small.STRATEGIES,
    "optimizer sharded": lambda: tfpar.Mirrored(CPUS, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(CPUS, shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with computing_in("float64"):
        yield


class CallsMethods(keras.callbacks.Callback):
    """Calls methods of the model after each epoch, on batches that replicas do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        model, features, labels = self.model, parity_cases.inputs(7), parity_cases.labels(7)
        self.results.append(
            {
                "evaluate": model.evaluate(features, labels, batch_size=3, verbose=0),
                "evaluate as dict": list(model.evaluate(small.data(), verbose=0, return_dict=True).values()),
                "predict": model.predict(features, batch_size=3, verbose=0),
                "predict a row": model.predict(features[:1], verbose=0),
                "predict_on_batch": model.predict_on_batch(features),
                "test_on_batch": model.test_on_batch(features, labels),
                "call": keras.ops.convert_to_numpy(model(features)),
            }
        )


def trained(train: Any, **fit: Any) -> list[dict[str, Any]]:
    """Return what the methods return after each of two epochs."""
    callback = CallsMethods()
    train.fit(small.data(), epochs=2, verbose=0, callbacks=[callback], **fit)
    return callback.results


def of_keras() -> list[dict[str, Any]]:
    """Return what they return in Keras' own `fit` on one device."""
    keras.utils.set_random_seed(0)
    return trained(small.build_model())


def assert_equal(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for epoch, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for name, values in other.items():
            np.testing.assert_allclose(one[name], values, **EXACT, err_msg=f"{name}, epoch {epoch}")


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_methods_in_callbacks_equal_one_device(strategy: str) -> None:
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    assert_equal(trained(trainer), of_keras())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "tensor parallel"])
def test_fit_of_the_model_equals_one_device(strategy: str) -> None:
    """Also the loss that is logged, for batches that replicas do not share evenly."""

    def fit(model: keras.Model) -> Any:
        history = model.fit(parity_cases.inputs(7), parity_cases.labels(7), batch_size=3, verbose=0, shuffle=False)
        return [*history.history["loss"], *model.get_weights()]

    keras.utils.set_random_seed(0)
    expected = fit(small.build_model())
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    for one, other in zip(fit(trainer.model), expected, strict=True):
        np.testing.assert_allclose(one, other, **EXACT)


def test_methods_see_new_weights_and_a_new_compilation() -> None:
    trainer = tfpar.Trainer(small.build_model, STRATEGIES["mirrored"](), seed=0)
    features = parity_cases.inputs(5)
    trainer.model.predict_on_batch(features)
    trainer.model.set_weights([weights + 1.0 for weights in trainer.model.get_weights()])
    trainer.compile("sgd", trainer.model.loss)
    expected = keras.ops.convert_to_numpy(trainer.model(features))
    np.testing.assert_allclose(trainer.model.predict_on_batch(features), expected, **EXACT)
    np.testing.assert_allclose(trainer.model.predict(features, verbose=0), expected, **EXACT)


@pytest.mark.extended
def test_methods_of_a_model_in_the_scope_of_tensorflows_own_strategy() -> None:
    with tf.distribute.MirroredStrategy(CPUS).scope():
        keras.utils.set_random_seed(0)
        model = small.build_model()
    callback = CallsMethods()
    tfpar.fit(model, small.data(), epochs=2, verbose=0, callbacks=[callback])
    assert_equal(callback.results, of_keras())


MOVING: dict[str, Callable[[], tfpar.Strategy]] = {
    **STRATEGIES,
    "stages of shards": lambda: tfpar.Pipeline(2, 2, num_shards=2, balance="parameters"),
    "replicas of stages": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", MOVING)
def test_methods_called_before_the_weights_move_see_the_trained_weights(strategy: str) -> None:
    """Keras keeps its traced functions, with the memory that the weights had."""
    features, labels = parity_cases.inputs(6), parity_cases.labels(6)
    keras.utils.set_random_seed(0)
    model = small.build_model()
    encoder = keras.Model(model.inputs[0], model.layers[0].output)
    encoder.compile(loss="mse")
    codes = encoder.predict(features, verbose=0)
    model.predict(features, verbose=0), model.test_on_batch(features, labels)
    encoder.evaluate(features, np.zeros_like(codes), verbose=0)
    tfpar.Trainer(model, MOVING[strategy]()).fit(small.data(), verbose=0)
    expected = keras.ops.convert_to_numpy(model(features))
    np.testing.assert_allclose(model.predict(features, verbose=0), expected, **EXACT)
    expected_codes = keras.ops.convert_to_numpy(encoder(features))
    assert np.abs(expected_codes - codes).max() > 1e-3, "the training moves the codes"
    np.testing.assert_allclose(encoder.predict(features, verbose=0), expected_codes, **EXACT)
    loss = encoder.evaluate(features, np.zeros_like(codes), verbose=0)
    np.testing.assert_allclose(loss, np.square(expected_codes).mean(), **EXACT)


class Doubles(keras.Model):
    """A model with its own `predict`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, features: Any) -> Any:
        return self.dense(features)

    def predict(self, *data: Any, **settings: Any) -> Any:
        return 2.0 * super().predict(*data, **settings)


def test_a_method_of_the_users_class_stays() -> None:
    def build() -> keras.Model:
        model = Doubles()
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build, STRATEGIES["mirrored"](), seed=0)
    features = parity_cases.inputs(4)
    expected = trainer.predict(features, verbose=0)
    np.testing.assert_allclose(trainer.model.predict(features, verbose=0), 2.0 * expected, **EXACT)


def distilled() -> keras.Model:
    student = keras.Sequential(
        [keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(5, "relu")], name="student"
    )
    student.add(keras.layers.Dense(3))
    outer = keras.Input((parity_cases.NUM_FEATURES,))
    model = keras.Model(outer, student(outer) * 1.0)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def trained_inside(model: keras.Model) -> tuple[Any, ...]:
    """Train the model inside of a model by itself, as scripts do after distillation; return what its methods return."""
    student, features, labels = model.get_layer("student"), parity_cases.inputs(23), parity_cases.labels(23)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    student.compile(keras.optimizers.SGD(0.1, clipnorm=0.05), loss)
    history = student.fit(features, labels, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    evaluated = student.evaluate(features, labels, batch_size=8, verbose=0)
    return history, evaluated, student.predict(features, batch_size=8, verbose=0), *model.get_weights()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", "optimizer sharded"])
def test_a_model_inside_of_a_mirrored_one_trains_by_its_own_methods_as_on_one_device(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    expected = trained_inside(distilled())
    trainer = tfpar.Trainer(distilled, STRATEGIES[strategy](), seed=0)
    with pytest.raises(
        ValueError, match=r"^train_on_batch of 'student' is Keras' own, which does not run on the copies"
    ):
        trainer.model.get_layer("student").train_on_batch(parity_cases.inputs(8), parity_cases.labels(8))
    for one, other in zip(trained_inside(trainer.model), expected, strict=True):
        np.testing.assert_allclose(one, other, **EXACT)
