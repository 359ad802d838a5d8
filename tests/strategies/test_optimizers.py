"""Optimizers of users: without a configuration, reading names, or taking all weights at once, as under Keras' `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, shard_cases, small
from tests.support.pipeline_models import crossentropy, deep, labelled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "sharded weights": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "replicas of pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="memory"), 2),
    "sharded state": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "single device": lambda: tfpar.SingleDevice("CPU:1"),
}


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 * keras.ops.minimum(1.0, (keras.ops.cast(step, "float32") + 1) / 5)


class Silent(keras.optimizers.Adam):
    """An optimizer that reads an argument of its own, and has lists that `build` fills."""

    def __init__(self, rate: float, factor: float) -> None:
        super().__init__(rate)
        self.factor, self.counts = factor, []

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.counts += [self.add_variable_from_reference(one, "count") for one in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.counts[self._get_variable_index(variable)], keras.ops.ones_like(variable))
        super().update_step(self.factor * gradient, variable, learning_rate)

    def get_config(self) -> Any:
        raise NotImplementedError


OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "optimizer": lambda: Silent(0.01, 2.0),
    "schedule of scaled losses": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(WarmUp(), momentum=0.9)
    ),
}


def without_configuration(optimizer: str) -> keras.Model:
    model = deep()
    model.compile(OPTIMIZERS[optimizer](), crossentropy())
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_without_a_configuration_trains(strategy: str, optimizer: str) -> None:
    small.assert_trains_as_one_device(lambda: without_configuration(optimizer), labelled, STRATEGIES[strategy])


def test_shards_of_matrices_take_a_schedule_without_a_configuration() -> None:
    build = lambda: without_configuration("schedule of scaled losses")  # noqa: E731
    small.assert_trains_as_one_device(build, labelled, lambda: tfpar.TensorParallel(2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_preview_measures_the_update_of_a_copy(optimizer: str) -> None:
    trainer = tfpar.Trainer(lambda: without_configuration(optimizer), tfpar.Pipeline(2, 2), seed=0)
    before = trainer.model.get_weights()
    assert "stage" in str(trainer.preview(labelled()))
    for one, other in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    optimizers = [trainer.model.optimizer, getattr(trainer.model.optimizer, "inner_optimizer", None)]
    variables = [one for optimizer in optimizers if optimizer for one in optimizer.variables if "count" in one.path]
    assert not any(np.any(one.numpy()) for one in variables), "the update of a preview is not one of the optimizer"


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["sharded state", "sharded weights", "replicas of pipelines"])
@pytest.mark.parametrize("optimizer", shard_cases.OF_ALL_WEIGHTS)
def test_an_optimizer_that_takes_all_weights_at_once_equals_one_device(optimizer: str, strategy: str) -> None:
    build = shard_cases.classifier(shard_cases.OF_ALL_WEIGHTS[optimizer])
    small.assert_trains_as_one_device(build, small.data, STRATEGIES[strategy])


class ByName(keras.optimizers.SGD):
    """A tenth of the learning rate for the backbone, with the methods of a `tf.Variable`."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.seen: set[str] = set()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.seen.add(variable.name)
        rate = tf.cast(learning_rate, variable.dtype) * (0.1 if "backbone" in variable.name else 1.0)
        rows = tf.IndexedSlices(gradient * rate, tf.range(gradient.shape[0]))
        variable.scatter_sub(rows)


def by_name(*inputs: Any) -> keras.Model:
    layers = [
        keras.layers.Dense(8, "tanh", name="backbone"),
        keras.layers.LayerNormalization(name="layer_norm"),
        keras.layers.Dense(3, name="head"),
    ]
    model = keras.Sequential([*inputs, *layers], name="net")
    model.compile(ByName(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def built_by_name() -> keras.Model:
    return by_name(keras.Input((parity_cases.NUM_FEATURES,)))


def fitted(
    build: Callable[[], keras.Model], strategy: tfpar.Strategy | None, built_before: bool = False
) -> keras.Model:
    keras.utils.set_random_seed(0)
    if strategy is None:
        model = build()
        model.fit(small.data(), verbose=0)
        return model
    trainer = tfpar.Trainer(build() if built_before else build, strategy, seed=0)
    trainer.fit(small.data(), verbose=0)
    return trainer.model


@pytest.mark.few(1)
@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_own_update_step_takes_the_variables_that_keras_passes(strategy: str, built_before: bool) -> None:
    found, expected = fitted(built_by_name, STRATEGIES[strategy](), built_before), fitted(built_by_name, None)
    assert found.optimizer.seen == expected.optimizer.seen
    small.assert_same_state(found.get_weights(), expected.get_weights(), 1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["single device", "mirrored", "sharded weights"])
def test_weights_that_the_first_batch_creates_have_the_names_of_keras(strategy: str) -> None:
    found, expected = fitted(by_name, STRATEGIES[strategy]()), fitted(by_name, None)
    assert found.optimizer.seen == expected.optimizer.seen
