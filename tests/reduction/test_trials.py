"""Trials before the first step must not take random numbers for a dependence on the other examples of a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import small
from tfpar._compat import typical_draws

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

identity = layers.Identity
FEATURES = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
TARGETS = FEATURES[:, :3]


@tf.function
def drawn_in_a_function(shape: Any) -> tf.Tensor:
    return tf.random.normal(shape)


class Draws(layers.Layer):
    """Makes something of its inputs and random numbers, in training and in inference."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="draws")
        self.function, self.seeds = function, [keras.random.SeedGenerator(1)]

    def call(self, inputs: Any) -> Any:
        return self.function(inputs, self.seeds[0])


def chosen(inputs: Any, seed: Any) -> Any:
    """One of two results for each example, as layers that augment images do."""
    probability = keras.random.uniform((ops.shape(inputs)[0], 1), seed=seed)
    return ops.where(probability > 0.5, 2.0 * inputs, inputs)


def noisy_mean(inputs: Any, seed: Any) -> Any:
    return inputs - ops.mean(inputs, axis=0) * keras.random.normal(ops.shape(inputs), seed=seed)


def noise_by_size(inputs: Any, seed: Any) -> Any:
    """Neighbours do not matter, but how many there are does."""
    noise = keras.random.normal(ops.shape(inputs), seed=seed)
    return inputs + noise / ops.cast(ops.shape(inputs)[0], inputs.dtype)


def permuted(inputs: Any, seed: Any) -> Any:
    return ops.take(inputs, ops.argsort(keras.random.uniform((ops.shape(inputs)[0],), seed=seed)), axis=0)


def tensorflow_and_neighbour(inputs: Any, seed: Any) -> Any:
    return inputs[::-1] + tf.random.gamma(tf.shape(inputs), 1.0)


ALONE = {
    "dropout": lambda inputs, seed: keras.random.dropout(inputs, 0.5, seed=seed),
    "chosen": chosen,
    "whole numbers": lambda inputs, seed: inputs + ops.cast(
        keras.random.randint(ops.shape(inputs), -3, 0, seed=seed), "float32"
    ),
    "in a tf.function": lambda inputs, seed: inputs + drawn_in_a_function(tf.shape(inputs)),
}  # fmt: skip
MIXING = {
    "mean": noisy_mean,
    "size of the batch": noise_by_size,
    "permutation": permuted,
    "TensorFlow's numbers and neighbours": tensorflow_and_neighbour,
}


def model_of(layer: Callable[[], layers.Layer], loss: Any = "mse", **compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layer(), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), loss, **compiled)
        return model

    return build


def trainer_of(build: Callable[[], keras.Model], strategy: str) -> tfpar.Trainer:
    return tfpar.Trainer(build, small.SPLITTING_STRATEGIES[strategy](), seed=0)


@small.each_splitting_strategy
@pytest.mark.parametrize("name", ALONE)
def test_a_layer_that_draws_in_inference_too_trains_and_predicts_other_numbers_each_time(
    name: str, strategy: str
) -> None:
    trainer = trainer_of(model_of(lambda: Draws(ALONE[name])), strategy)
    history = trainer.fit(FEATURES, TARGETS, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    once, again = (trainer.predict(FEATURES, batch_size=8, verbose=0) for _ in range(2))
    assert np.abs(once - again).mean() > 0.01


@small.each_splitting_strategy
@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_draws_and_mixes_is_refused(name: str, strategy: str) -> None:
    trainer = trainer_of(model_of(lambda: Draws(MIXING[name])), strategy)
    with pytest.raises(ValueError, match=r"received 'draws', where an example depends on the others of its batch"):
        trainer.fit(FEATURES, TARGETS, batch_size=8, verbose=0)


IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "without a seed": lambda inputs, seed: inputs + np.random.default_rng().normal(size=4).astype("float32"),
    "a coin": lambda inputs, seed: inputs * int(np.random.default_rng().integers(2)),
    "NumPy's generator": lambda inputs, seed: inputs + np.random.normal(size=4).astype("float32"),
    "Python's generator": lambda inputs, seed: inputs + random.random(),
}


@small.each_splitting_strategy
@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_layer_that_draws_with_numpy_or_python_is_refused(name: str, strategy: str) -> None:
    """Each replica would train with other constants; the verdict depended on what was drawn."""
    trainer = trainer_of(model_of(lambda: Draws(IN_PYTHON[name])), strategy)
    with pytest.raises(
        ValueError, match=r"random numbers with keras\.random or tf\.random, received 'draws', which draws"
    ):
        trainer.fit(FEATURES, TARGETS, batch_size=8, verbose=0)


def test_a_layer_with_a_generator_of_its_own_and_a_loss_that_draws_are_refused() -> None:
    class Holds(Draws):
        def __init__(self) -> None:
            super().__init__(lambda inputs, seed: inputs + float(self.generator.normal()))
            self.generator = np.random.default_rng(0)

    for build in (model_of(Holds), model_of(identity, lambda y, p: ops.square(y - p) * np.random.rand())):
        with pytest.raises(ValueError, match="which draws from NumPy or Python"):
            trainer_of(build, "mirrored").fit(FEATURES, TARGETS, batch_size=8, verbose=0)


@small.each_splitting_strategy
def test_a_layer_that_draws_the_same_numbers_each_time_equals_one_device(strategy: str) -> None:
    build = model_of(lambda: Draws(lambda x, seed: x * np.random.default_rng(3).uniform(size=4).astype("float32")))
    dataset = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(8)
    small.assert_trains_as_one_device(build, lambda: dataset, small.SPLITTING_STRATEGIES[strategy], epochs=1)


def test_a_subclassed_model_that_draws_and_mixes_is_refused_for_prediction() -> None:
    class Own(keras.Model):
        def __init__(self, function: Any) -> None:
            super().__init__(name="draws")
            self.inner = Draws(function)

        def call(self, inputs: Any) -> Any:
            return inputs + self.inner(inputs)

    trainer_of(lambda: Own(chosen), "mirrored").predict(FEATURES, verbose=0)
    with pytest.raises(ValueError, match="which draws from NumPy or Python"):
        trainer_of(lambda: Own(IN_PYTHON["a coin"]), "mirrored").predict(FEATURES, verbose=0)
    for function in (noisy_mean, noise_by_size):
        with pytest.raises(ValueError, match="where an example depends on the others"):
            trainer_of(lambda function=function: Own(function), "mirrored").predict(FEATURES, verbose=0)


def test_data_that_another_thread_augments_meanwhile_are_random() -> None:
    with typical_draws.typical_draws() as drawn, ThreadPoolExecutor(1) as thread:
        assert len(set(keras.random.uniform((4,)).numpy())) == 1
        assert len(set(thread.submit(lambda: tf.random.uniform((4,))).result().numpy())) == 4
    assert drawn == ["uniform"]


class Samples(layers.Layer):
    """As in a variational autoencoder: noise in training and in inference, and an added loss of what it makes."""

    def __init__(self, from_tensorflow: bool) -> None:
        super().__init__()
        self.seeds = None if from_tensorflow else keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        if self.seeds is None:
            outputs = inputs + tf.random.normal(tf.shape(inputs))
        else:
            outputs = inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds)
        self.add_loss(0.1 * ops.mean(ops.square(outputs)))
        return outputs


def squared(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(targets - outputs))


def summed(targets: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(targets - outputs))


@small.each_splitting_strategy
@pytest.mark.parametrize("from_tensorflow", [False, True])
def test_losses_and_metrics_of_noise_are_recognized_as_sums_or_means(strategy: str, from_tensorflow: bool) -> None:
    """Scalars over parts of a batch and over all of it, of numbers drawn for each."""
    build = model_of(lambda: Samples(from_tensorflow), squared, metrics=[squared])
    history = trainer_of(build, strategy).fit(FEATURES, TARGETS, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"]).all()


class AddsMean(layers.Layer):
    """Adds a loss, also where a later layer fails."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(inputs))
        return inputs


@small.each_splitting_strategy
def test_a_model_that_runs_in_training_only_trains(strategy: str) -> None:
    """RandomCrop gives images of another size in inference, as in Keras, and Dense takes one size."""

    def build() -> keras.Model:
        crop = [AddsMean(), layers.RandomCrop(6, 6), layers.Flatten()]
        model = keras.Sequential([keras.Input((8, 8, 1)), *crop, layers.Dense(4), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    trainer = trainer_of(build, strategy)
    images = np.ones((24, 8, 8, 1), "float32")  # every crop of them is the same
    loss = trainer.fit(images, TARGETS, batch_size=8, verbose=0).history["loss"]
    keras.utils.set_random_seed(0)
    assert loss == pytest.approx(build().fit(images, TARGETS, batch_size=8, verbose=0).history["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 36"):
        trainer.predict(images, verbose=0)


class OwnLoss(keras.Model):
    """Overrides `compute_loss`."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.sqrt(ops.sum(ops.square(y - y_pred)))


def own_loss(**compiled: Any) -> keras.Model:
    inputs = keras.Input((4,))
    model = OwnLoss(inputs, layers.Dense(3)(layers.Dense(4)(inputs)))
    model.compile("sgd", **compiled)
    return model


class AddsNorm(layers.Layer):
    """Adds a loss that is neither a sum nor a mean."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sqrt(ops.sum(ops.square(inputs))))
        return inputs


class AddsInEachMode(layers.Layer):
    """Adds one loss in training and another one in inference."""

    def __init__(self, in_training: Callable[[Any], Any], in_inference: Callable[[Any], Any]) -> None:
        super().__init__()
        self.functions = in_inference, in_training

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.add_loss(0.1 * self.functions[bool(training)](inputs))
        return inputs


def norm(inputs: Any) -> Any:
    return ops.sqrt(ops.sum(ops.square(inputs)))


@small.each_splitting_strategy
def test_losses_that_a_layer_adds_in_one_mode_do_not_decide_about_those_of_the_other(strategy: str) -> None:
    def dataset() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(7)

    build = model_of(lambda: AddsInEachMode(ops.sum, ops.mean))
    small.assert_trains_as_one_device(build, dataset, small.SPLITTING_STRATEGIES[strategy], epochs=1)

    trains = trainer_of(model_of(lambda: AddsInEachMode(ops.mean, norm)), strategy)
    keras.utils.set_random_seed(0)
    expected = model_of(lambda: AddsInEachMode(ops.mean, norm))().fit(dataset(), verbose=0).history["loss"]
    assert trains.fit(dataset(), verbose=0).history["loss"] == pytest.approx(expected, rel=1e-5)
    evaluates = trainer_of(model_of(lambda: AddsInEachMode(norm, ops.mean)), strategy)
    keras.utils.set_random_seed(0)
    loss = model_of(lambda: AddsInEachMode(norm, ops.mean))().evaluate(dataset(), verbose=0)
    assert evaluates.evaluate(dataset(), verbose=0) == pytest.approx(loss, rel=1e-5)
    for call in (trains.evaluate, evaluates.fit):
        with pytest.raises(ValueError, match="A loss added with add_loss"):
            call(dataset(), verbose=0)


class OwnReduction(keras.losses.Loss):
    """Reduces in `__call__`."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ops.mean(ops.square(y_true - y_pred))


def of_all(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(ops.sum(ops.square(targets - outputs)))


def compares(targets: Any, outputs: Any) -> Any:
    return outputs @ ops.transpose(outputs)


REFUSED: dict[str, Callable[[], keras.Model]] = {
    "compute_loss": lambda: own_loss(loss="mse"),
    "compute_loss, several losses": lambda: own_loss(loss=["mse", "mae"]),
    "added loss": model_of(AddsNorm),
    "reduces in __call__": model_of(identity, OwnReduction()),
    "scalar loss": model_of(identity, of_all),
    "matrix": model_of(identity, compares),
    "no reduction": model_of(identity, keras.losses.MeanSquaredError(reduction=None)),
    "Circle": model_of(identity, keras.losses.Circle()),
    "metric that sums": model_of(identity, metrics=[summed]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_refuses_a_loss_in_words_of_micro_batches(name: str) -> None:
    targets = TARGETS[:, 0] > 0 if name == "Circle" else TARGETS
    with pytest.raises(ValueError, match="micro-batch"):
        trainer_of(REFUSED[name], "pipeline").fit(FEATURES, targets, batch_size=8, verbose=0)
