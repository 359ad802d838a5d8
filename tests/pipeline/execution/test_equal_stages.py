"""Stages with equal operations are traced, split and compiled once; all others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.pipeline.execution.compiled_stages import Programs

pytestmark = pytest.mark.usefixtures("logical_cpus")

WIDTH = 8
NUM_BLOCKS = 6


class Scaled(keras.layers.Layer):
    """A layer with a factor that its configuration does not have, and a tensor that its graph captures if eager."""

    def __init__(self, factor: float, *, eager: bool = False) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), initializer="glorot_uniform")
        self.factor = tf.constant(factor, self.dtype) if eager else factor

    def call(self, inputs: Any) -> Any:
        return keras.ops.tanh(inputs @ self.kernel) * self.factor


def model_of(*blocks: Callable[[], list[Any]]) -> Callable[[], keras.Model]:
    """Return a model function: blocks in a row."""

    def build() -> keras.Model:
        layers = [layer for block in blocks for layer in block()]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


def dense() -> list[Any]:
    return [keras.layers.Dense(WIDTH, "tanh")]


def drawing() -> list[Any]:
    return [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.5)]


def normalizing() -> list[Any]:
    return [keras.layers.Dense(WIDTH), keras.layers.BatchNormalization(), keras.layers.ReLU()]


def gated() -> list[Any]:
    return [keras.layers.Dense(WIDTH, "silu")]  # a tf.custom_gradient of its own in each layer


def penalized() -> list[Any]:
    return [keras.layers.Dense(WIDTH, "tanh", activity_regularizer="l2")]


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(keras.config.floatx())
    return inputs, inputs[:, ::-1] * 0.5


def programs_of(build: Callable[[], keras.Model], strategy: Any, *, training: bool = True) -> Any:
    """The compiled stages of a model."""
    trainer = tfpar.Trainer(build, strategy, seed=0)
    trainer.build(tf.data.Dataset.from_tensor_slices(data()).batch(8))
    spec = tf.TensorSpec([None, WIDTH], keras.config.floatx())
    return strategy._steps[trainer.model].compiler.stages(spec, training=training).stages


@pytest.mark.parametrize("training", [True, False])
def test_equal_blocks_of_sharded_weights_are_one_program(training: bool) -> None:
    blocks = programs_of(model_of(*[dense] * NUM_BLOCKS), tfpar.Mirrored(shard="weights"), training=training)
    assert len(blocks) == NUM_BLOCKS
    assert len({id(one.functions) for one in blocks[1:]}) == 1  # the first one computes no gradient of its inputs
    assert len({id(one.parameters[0]) for one in blocks}) == NUM_BLOCKS


def test_equal_stages_on_several_devices_have_one_trace_and_a_program_on_each() -> None:
    strategy = tfpar.Pipeline(6, 3, "interleaved", devices=["CPU:0", "CPU:1", "CPU:2"], balance="parameters")
    stages = programs_of(model_of(*[dense] * 6), strategy)
    assert len({id(one.trace) for one in stages[1:]}) == 1
    assert stages[1].functions is stages[4].functions
    assert len({id(one.functions) for one in stages[1:4]}) == 3


def test_replicas_share_the_programs_of_equal_stages_on_their_devices() -> None:
    blocks = programs_of(model_of(*[dense] * NUM_BLOCKS), tfpar.Mirrored(shard="weights"))
    copies = Programs(blocks, (), {}).on(["CPU:1"] * NUM_BLOCKS).stages
    assert [one.device for one in copies] == ["CPU:1"] * NUM_BLOCKS
    assert len({id(one.functions) for one in copies}) == 2
    assert [one.parameters for one in copies] == [one.parameters for one in blocks]


DIFFERENT: dict[str, Callable[[], list[Any]]] = {
    "another activation": lambda: [keras.layers.Dense(WIDTH, "relu")],
    "another size": lambda: [keras.layers.Dense(WIDTH + 1, "tanh"), keras.layers.Dense(WIDTH, "tanh")],
    "no bias": lambda: [keras.layers.Dense(WIDTH, "tanh", use_bias=False)],
    "a loss": penalized,
    "a custom gradient": gated,
    "another type": lambda: [keras.layers.Dense(WIDTH, "tanh", dtype="float16")],
    "frozen": lambda: [keras.layers.Dense(WIDTH, "tanh", trainable=False)],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_blocks_that_differ_are_several_programs(name: str) -> None:
    first, middle, *others = programs_of(
        model_of(dense, dense, DIFFERENT[name], dense), tfpar.Mirrored(shard="weights")
    )
    assert middle.functions not in [others[0].functions, first.functions]


def test_a_factor_outside_of_the_configuration_makes_another_program() -> None:
    build = model_of(*[lambda factor=factor: [Scaled(factor)] for factor in (1.0, 2.0, 2.0, 3.0)])
    _, one, same, other = programs_of(build, tfpar.Mirrored(shard="weights"))
    assert one.functions is same.functions is not other.functions


ALIKE: dict[str, Callable[[], list[Any]]] = {
    "weights": dense,
    "random masks": drawing,
    "moving averages": normalizing,
    "custom gradients": gated,
    "added losses": penalized,
}


# Micro-batches draw other masks, and have other moments than the batch.
WITHOUT_MICROBATCHES = ["random masks", "moving averages"]


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("sharded weights", "pipeline") for name in ALIKE]
    + [("virtual stages", name) for name in ALIKE if name not in WITHOUT_MICROBATCHES],
)
def test_equal_stages_train_as_on_one_device(layout: str, name: str) -> None:
    """Each has its own weights, states, masks and losses."""
    strategies: dict[str, Callable[[], Any]] = {
        "sharded weights": lambda: tfpar.Mirrored(["CPU:0"], shard="weights"),
        "pipeline": lambda: tfpar.Pipeline(4, 1, balance="parameters"),
        "virtual stages": lambda: tfpar.Pipeline(4, 2, "interleaved", devices=["CPU:0", "CPU:1"], balance="parameters"),
    }
    assert_as_one_device(model_of(*[ALIKE[name]] * NUM_BLOCKS), strategies[layout]())


def test_blocks_with_captured_tensors_of_their_own_train_as_on_one_device() -> None:
    factors = (0.5, 1.5, 2.0, 0.25)
    build = model_of(*[lambda factor=factor: [Scaled(factor, eager=True)] for factor in factors])
    assert_as_one_device(build, tfpar.Mirrored(shard="weights"))


def assert_as_one_device(build: Callable[[], keras.Model], strategy: Any) -> None:
    trainers = [tfpar.Trainer(build, one, seed=0) for one in (tfpar.SingleDevice(), strategy)]
    for trainer in trainers:
        trainer.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    expected, found = ([variable.numpy() for variable in one.model.variables] for one in trainers)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
