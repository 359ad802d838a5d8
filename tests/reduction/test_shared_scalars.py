"""The weights of a device share the scalars of an update, and train as under Keras' own `fit`."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.variables.tf_shared_scalars import SharedScalars

pytestmark = pytest.mark.usefixtures("logical_cpus")


def weights_on(*devices: str) -> list[keras.Variable]:
    found = []
    for number, device in enumerate(devices):
        with tf.device(device):
            found.append(keras.Variable(np.ones([2, 3]), name=f"weight_{number}"))
    return found


def kinds(function: Any, *arguments: Any) -> collections.Counter[str]:
    """Return the kinds of the operations that a function creates, with their numbers."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return collections.Counter(op.type for op in graph.get_operations())


@pytest.mark.parametrize(
    ("devices", "powers"), [(["CPU:0"] * 5, 2), (["CPU:0", "CPU:1"] * 2, 4)], ids=["one device", "two devices"]
)
def test_each_device_computes_the_scalars_of_adam_once(devices: list[str], powers: int) -> None:
    weights = weights_on(*devices)
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)

    def update() -> None:
        with keras_optimizer.one_device_optimizer():
            optimizer.apply([tf.ones([2, 3])] * len(weights), weights)

    found = kinds(update)
    assert found["Pow"] == powers
    assert found["AssignSubVariableOp"] == len(weights)


class Counting(keras.optimizers.SGD):
    """Each weight has a smaller rate than the one before, by a state that each update changes."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable((), "zeros", name="count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.count, ops.ones(()))
        super().update_step(gradient, variable, learning_rate / self.count)


class Deciding(keras.optimizers.SGD):
    """A conditional changes the state between two reads of it."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable((), "ones", name="count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        before = ops.convert_to_tensor(self.count) * 1.0
        tf.cond(tf.reduce_sum(gradient) > 0, lambda: self.count.assign(self.count + 1.0), lambda: self.count.value)
        super().update_step(gradient, variable, learning_rate * before / self.count)


class Slowing(keras.optimizers.SGD):
    """Each weight has half the learning rate of the one before, as a variable that each update changes."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        self._learning_rate.assign(self._learning_rate * 0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize("make_optimizer", [Counting, Deciding, Slowing, lambda: keras.optimizers.AdamW(0.01)])
@pytest.mark.parametrize(
    "make_strategy",
    [lambda: tfpar.SingleDevice("CPU:1"), lambda: tfpar.Pipeline(2, 2, balance="parameters")],
    ids=["one device", "pipeline"],
)
def test_an_optimizer_with_a_state_of_its_own_trains_as_under_keras(
    make_optimizer: Callable[..., keras.Optimizer], make_strategy: Callable[[], tfpar.Strategy]
) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(4), layers.Dense(1)])
        model.compile(make_optimizer(), "mse")
        return model

    generator = np.random.default_rng(0)
    arrays = generator.normal(size=(24, 3)).astype("float32"), generator.normal(size=(24, 1)).astype("float32")
    trainer = tfpar.Trainer(build, make_strategy(), seed=0)
    trainer.fit(tf.data.Dataset.from_tensor_slices(arrays).batch(8), epochs=2, verbose=0)
    keras.utils.set_random_seed(0)
    own = build()
    own.fit(tf.data.Dataset.from_tensor_slices(arrays).batch(8), epochs=2, shuffle=False, verbose=0)
    for mine, keras_own in zip(trainer.model.variables, own.variables, strict=True):
        np.testing.assert_allclose(mine, keras_own, rtol=1e-5, atol=1e-7, err_msg=mine.path)


def test_a_variable_is_read_again_once_it_has_changed() -> None:
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        scalars, found = SharedScalars(), []
        for _ in range(2):
            with scalars.shared():
                found += [variable + 1.0, variable + 1.0]
                variable.assign_add(10.0)
        assert found[0] is found[1]
        return found

    assert [one.numpy() for one in step()] == [2, 2, 12, 12]


def test_scalars_of_other_devices_and_orders_and_those_that_are_drawn_are_not_shared() -> None:
    def step(one: tf.Tensor) -> list[tf.Tensor]:
        scalars, found = SharedScalars(), []
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device), scalars.shared():
                found += [one * 2.0, one * 2.0, tf.random.uniform([])]
        with scalars.shared("CPU:1"):
            found.append(one * 2.0)
            with tf.control_dependencies(found[:1]):
                found.append(one * 2.0)
        return found

    found = kinds(step, tf.constant(1.0))
    assert (found["Mul"], found["RandomUniform"]) == (4, 2)


def test_tensors_that_are_no_scalars_are_not_shared() -> None:
    def step(one: tf.Tensor) -> list[tf.Tensor]:
        scalars, found = SharedScalars(), []
        for _ in range(2):
            with scalars.shared():
                found.append(one * 2.0)
        return found

    assert kinds(step, tf.ones([2]))["Mul"] == 2


def test_the_gradient_by_a_scalar_counts_only_its_own_uses() -> None:
    @tf.function(autograph=False)
    def step(rate: tf.Tensor) -> tf.Tensor:
        with SharedScalars().shared(), tf.GradientTape() as tape:
            watched = rate * 1.0
            tape.watch(watched)
            product = watched * (rate * 1.0)
        return tape.gradient(product, watched)

    assert float(step(tf.constant(3.0))) == 3
