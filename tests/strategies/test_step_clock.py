"""The clock of a train step: it notes what each phase takes, on each replica, and changes no bit of the weights."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tfpar.strategies.step_clock import PHASES

pytestmark = pytest.mark.usefixtures("logical_cpus")

CPUS = ["CPU:0", "CPU:1"]
FORWARD_SECONDS, BACKWARD_SECONDS, UPDATE_SECONDS = 0.06, 0.12, 0.09
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: tfpar.SingleDevice("CPU:0"),
    "replicas": lambda: tfpar.Mirrored(CPUS),
    "sharded state": lambda: tfpar.Mirrored(CPUS, shard="optimizer"),
    "shards": lambda: tfpar.TensorParallel(2, devices=CPUS),
}


def sleep(tensor: tf.Tensor, seconds: float) -> tf.Tensor:
    def body(rows: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return rows

    slept = tf.numpy_function(body, [tensor], tensor.dtype, stateful=False)
    slept.set_shape(tensor.shape)
    return slept


class Sleeping(keras.layers.Layer):
    """Sleeps in both passes."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def passed_on(inputs: tf.Tensor) -> Any:
            return sleep(inputs, FORWARD_SECONDS), lambda gradient: sleep(gradient, BACKWARD_SECONDS)

        return passed_on(inputs)


class SleepingSGD(keras.optimizers.SGD):
    """Sleeps in the update of each kernel."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(gradient.shape) == 2:
            gradient = sleep(gradient, UPDATE_SECONDS)
        super().update_step(gradient, variable, learning_rate)


def sleeping() -> keras.Model:
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, "tanh"), Sleeping(), keras.layers.Dense(1)])
    model.compile(SleepingSGD(0.1), "mse")
    return model


def fitted_moments(strategy: Any, build: Callable[[], keras.Model]) -> np.ndarray:
    clock = strategy.start_clock()
    rows = np.ones([8, 5], "float32"), np.ones([8, 1], "float32")
    tfpar.Trainer(build, strategy, seed=0).fit(tf.data.Dataset.from_tensors(rows), epochs=3, verbose=0)
    moments: np.ndarray = clock.read()
    assert moments.shape == (strategy.num_replicas, 1 + len(PHASES))
    return moments[:, (moments > 0).all(0)]


def test_a_phase_takes_what_sleeps_in_it() -> None:
    ((forward, backward, update),) = np.diff(fitted_moments(STRATEGIES["one device"](), sleeping))
    assert FORWARD_SECONDS < forward < BACKWARD_SECONDS
    assert BACKWARD_SECONDS < backward < BACKWARD_SECONDS + UPDATE_SECONDS
    assert update > UPDATE_SECONDS, "which the backward pass does not hide"


class HeavyForward(keras.layers.Layer):
    """Multiplies matrices that no gradient needs."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        heavy = tf.reduce_sum(inputs) * tf.ones([700, 700])
        for _ in range(6):
            heavy = tf.matmul(heavy, heavy) / 700.0
        return inputs + tf.stop_gradient(0.0 * tf.reduce_mean(tf.tanh(heavy)))


def heavy_forward() -> keras.Model:
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8), HeavyForward(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_each_replica_has_its_own_phases() -> None:
    moments = fitted_moments(STRATEGIES["replicas"](), heavy_forward)
    assert moments.shape == (2, 5), "with the all-reduce"
    assert len(set(moments[:, 1])) == 2
    for forward, backward, _, update in np.diff(moments):  # one waits in the all-reduce for the other
        assert forward > backward + update, moments


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_timed_training_has_the_bits_of_one_that_is_not(name: str) -> None:
    weights = []
    for is_timed in (False, True):
        strategy = STRATEGIES[name]()
        if is_timed:
            clock = strategy.start_clock()
        trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
        trainer.fit(small.data(), epochs=2, verbose=0)
        weights.append([weight.numpy() for weight in trainer.model.weights])
    for timed, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(timed, other)
    assert (clock.read()[:, :3] > 0).all()
