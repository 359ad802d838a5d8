"""Stages with equal layer calls are differentiated, split and compiled once; all others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

WIDTH = 8
NUM_BLOCKS = 6


class Scaled(keras.layers.Layer):
    """A layer with a factor that its configuration does not have."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), initializer="glorot_uniform")
        self.factor = factor

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


def recurrent() -> list[Any]:
    reshape = [keras.layers.Reshape((2, WIDTH // 2)), keras.layers.GRU(WIDTH // 2, return_sequences=True)]
    return [*reshape, keras.layers.Flatten()]


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(keras.config.floatx())
    return inputs, inputs[:, ::-1] * 0.5


def programs_of(build: Callable[[], keras.Model], strategy: Any, *, training: bool = True) -> Any:
    """The compiled stages of a model."""
    trainer = tfpar.Trainer(build, strategy, seed=0)
    trainer.build(tf.data.Dataset.from_tensor_slices(data()).batch(8))
    spec = tf.TensorSpec([None, WIDTH], keras.config.floatx())
    return strategy.engine._steps[trainer.model].compiler.stages(spec, training=training).stages


@pytest.mark.parametrize("training", [True, False])
def test_equal_blocks_of_sharded_weights_are_one_program(training: bool) -> None:
    blocks = programs_of(model_of(*[dense] * NUM_BLOCKS), tfpar.Mirrored(shard="weights"), training=training)
    assert len(blocks) == NUM_BLOCKS
    assert len({id(one.functions) for one in blocks[1:]}) == 1  # the first one computes no gradient of its inputs
    assert len({id(one.parameters[0]) for one in blocks}) == NUM_BLOCKS


class Choosing(keras.layers.Layer):
    """Layers with the same operations, of which they return, add or assign others."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), initializer="glorot_uniform")
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.role = role

    def call(self, inputs: Any) -> Any:
        one, other = keras.ops.tanh(inputs @ self.kernel), keras.ops.sigmoid(inputs @ self.kernel)
        mean = keras.ops.mean(one)
        value = self.state + mean
        if self.role == "adds":
            self.add_loss(mean)
        if self.role == "assigns":
            self.state.assign(value)
        return other if self.role == "other" else one


class Reversed(keras.layers.Layer):
    """A layer whose factor is in its gradient alone, which has it from around it, from the layer, or from itself."""

    def __init__(self, factor: float, source: str = "around") -> None:
        super().__init__()
        self.factor, self.source = factor, source

    def call(self, inputs: Any) -> Any:
        factor = self.factor

        def of_number(upstream: tf.Tensor) -> tf.Tensor:
            return upstream * factor

        def of_layer(upstream: tf.Tensor) -> tf.Tensor:
            return upstream * self.factor

        def of_itself(upstream: tf.Tensor) -> tf.Tensor:
            return upstream * of_itself.factor  # type: ignore[attr-defined]

        of_itself.factor = factor  # type: ignore[attr-defined]
        names: dict[str, Any] = {"factor": factor}
        exec(OF_NAMES, names)
        gradients = {"around": of_number, "layer": of_layer, "itself": of_itself, "names": names["backward"]}

        @tf.custom_gradient
        def reverse(values: tf.Tensor) -> Any:
            return tf.identity(values), gradients[self.source]

        return reverse(inputs)


OF_NAMES = compile("def backward(upstream):\n    return upstream * factor", "own", "exec")


class FromTable(keras.layers.Layer):
    """A layer with a table that is no constant of its graph, since it has more than 128 numbers."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.table = tf.fill([32, WIDTH], tf.constant(factor, self.dtype))

    def call(self, inputs: Any) -> Any:
        return inputs * keras.ops.mean(self.table, axis=0)


ROLES = ["one", "other", "adds", "assigns"]


FACTORS = (1.0, -0.5, 1.0, -0.5)
UNLIKE: dict[str, Callable[[], list[Any]]] = {
    "roles": lambda: [[Choosing(role)] for role in ROLES * 2],
    **{
        f"gradients, {source}": lambda source=source: [
            [keras.layers.Dense(WIDTH, "tanh"), Reversed(factor, source)] for factor in FACTORS
        ]
        for source in ("around", "layer", "itself", "names")
    },
    "settings": lambda: [
        dense(),
        [keras.layers.Dense(WIDTH, "relu")],
        [keras.layers.Dense(WIDTH, "tanh", use_bias=False)],
        [keras.layers.Dense(WIDTH, "tanh", trainable=False)],
        penalized(),
        dense(),
    ],
    "factors": lambda: [[Scaled(factor)] for factor in (1.0, 2.0, 2.0, 3.0)],
    "tables": lambda: [[keras.layers.Dense(WIDTH, "tanh"), FromTable(factor)] for factor in (1.0, 0.5, 2.0, 1.0)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UNLIKE)
def test_blocks_that_differ_train_as_on_one_device(name: str) -> None:
    def build() -> keras.Model:
        return model_of(*[lambda layers=layers: layers for layers in UNLIKE[name]()])()

    assert_as_one_device(build, tfpar.Mirrored(["CPU:0"], shard="weights"))


ALIKE: dict[str, Callable[[], list[Any]]] = {
    "weights": dense,
    "random masks": drawing,
    "moving averages": normalizing,
    "custom gradients": gated,
    "added losses": penalized,
    "loops": recurrent,
}


def looked_up() -> list[Any]:
    """A block that reads rows of a table of its own, whose numbers depend on the examples."""
    return [keras.layers.Dense(WIDTH, "tanh"), LookedUp()]


class LookedUp(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(4, WIDTH)

    def call(self, inputs: Any) -> Any:
        return inputs + self.embedding(keras.ops.cast(keras.ops.abs(inputs[:, 0]) * 4, "int32"))


def counting() -> list[Any]:
    return [Counting()]


class Counting(keras.layers.Layer):
    """A layer with a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.metric = keras.layers.Dense(WIDTH, "tanh"), keras.metrics.Mean(name="mean")

    def call(self, inputs: Any) -> Any:
        found = self.dense(inputs)
        self.metric.update_state(keras.ops.mean(found, axis=-1))
        return found


ALIKE |= {"lookups": looked_up, "metrics": counting}
LAYOUTS: dict[str, Callable[[], Any]] = {
    "weights": lambda: tfpar.Mirrored(["CPU:0"], shard="weights"),
    "weights of two replicas": lambda: tfpar.Mirrored(shard="weights", devices=["CPU:0", "CPU:1"]),
    "pipeline": lambda: tfpar.Pipeline(4, 1, balance="parameters"),
    "virtual stages": lambda: tfpar.Pipeline(
        4, 2, "interleaved", devices=["CPU:0", "CPU:1"], balance="parameters", recompute=True
    ),
    "split passes": lambda: tfpar.Pipeline(3, 2, "zero_bubble", balance="parameters"),
    "replicas": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("layout", "name"),
    sampled(
        [("weights", name) for name in ALIKE] + [(layout, "lookups") for layout in LAYOUTS if layout != "weights"],
        of_ci=[*(("weights", name) for name in [*ALIKE][::2]), ("virtual stages", "lookups"), ("replicas", "lookups")],
    ),
)
def test_equal_stages_train_as_on_one_device(layout: str, name: str) -> None:
    """Each has its own weights, states, masks and losses."""
    assert_as_one_device(model_of(*[ALIKE[name]] * NUM_BLOCKS), LAYOUTS[layout]())


def test_equal_stages_with_one_layer_train_as_on_one_device() -> None:
    def build() -> keras.Model:
        shared = keras.layers.Dense(WIDTH, "tanh")
        given = keras.Input((WIDTH,))
        hidden = given
        for _ in range(4):
            hidden = keras.layers.Dense(WIDTH, "tanh")(shared(hidden))
        model = keras.Model(given, hidden)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_as_one_device(build, tfpar.Pipeline(4, 2, balance="parameters"))


def assert_as_one_device(build: Callable[[], keras.Model], strategy: Any) -> None:
    with computing_in("float64"):
        trainers = [tfpar.Trainer(build, one, seed=0) for one in (tfpar.SingleDevice(), strategy)]
        for trainer in trainers:
            trainer.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        expected, found = (results(trainer) for trainer in trainers)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


def results(trainer: tfpar.Trainer) -> list[np.ndarray]:
    """All variables, metrics, and predictions of a trained model."""
    logs = trainer.evaluate(*data(), batch_size=8, verbose=0, return_dict=True)
    variables = [variable.numpy() for variable in trainer.model.variables]
    return [
        *variables,
        *map(np.asarray, logs.values()),
        np.asarray(trainer.predict(data()[0], batch_size=8, verbose=0)),
    ]
