"""Recomputed layers: the results without recomputation, with less in memory between the passes."""

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

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]
BLOCKS = ["block_*", keras.layers.Dense]
Build = Callable[[], keras.Model]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


class Block(keras.layers.Layer):
    """Has everything that must happen once, whether it is recomputed or not: an added loss, a metric, inner layers."""

    def __init__(self, inner: list[keras.layers.Layer], **settings: Any) -> None:
        super().__init__(**settings)
        self.inner, self.size = inner, keras.metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        hidden = inputs
        for layer in self.inner:
            hidden = layer(hidden, training=training) if layer.name.startswith(("drop", "batch")) else layer(hidden)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(hidden)))
        self.size.update_state(keras.ops.mean(hidden, axis=-1))
        return inputs + hidden


def dense() -> list[keras.layers.Layer]:
    return [keras.layers.LayerNormalization(), keras.layers.Dense(8, "gelu"), keras.layers.Dense(8, "softmax")]


def random_and_normalized() -> list[keras.layers.Layer]:
    return [*dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.1)]


def model_of(inner: Callable[[], list[keras.layers.Layer]], mode: str | None = None, **compiled: Any) -> Build:
    def build() -> keras.Model:
        layers = [Block(inner(), name=f"block_{number}") for number in range(2)]
        settings = {"layer_names": ["block_0", "block_1"]} if mode == "list_of_layers" else {}
        with keras.RematScope(mode=mode, **settings):
            layers += [keras.layers.Dense(6, "gelu", name="end")]
        # In mode "larger_than" Keras calls a layer once more for its size, which must not add losses there.
        for layer in layers[:2] if mode != "larger_than" else []:
            layer._remat_mode = layers[2]._remat_mode  # as built in the scope, without Keras' own call of it
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(8), *layers])
        model.add(keras.layers.Dense(parity_cases.NUM_CLASSES, "softmax"))
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"], **compiled)
        return model

    return build


def data() -> tf.data.Dataset:
    return parity_cases.batches(31, 8)


def trained(build: Build, strategy: tfpar.Strategy) -> tuple[dict[str, Any], list[np.ndarray]]:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    return trainer.fit(data(), epochs=2, verbose=0).history, small.state(trainer.model)


STRATEGIES: dict[str, Callable[..., tfpar.Strategy]] = {
    "one device": lambda **settings: tfpar.SingleDevice("CPU:0", **settings),
    "replicas": lambda **settings: tfpar.Mirrored(TWO, **settings),
    "sharded state": lambda **settings: tfpar.Mirrored(TWO, shard="optimizer", **settings),
    "sharded weights": lambda **settings: tfpar.Mirrored(TWO, shard="weights", **settings),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", [True, BLOCKS], ids=["all", "named"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_recomputed_layers_equal_one_device(name: str, recompute: Any) -> None:
    small.assert_trains_as_one_device(model_of(dense), data, lambda: STRATEGIES[name](recompute=recompute), 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", [True, BLOCKS], ids=["all", "named"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_random_layers_and_moving_statistics_are_those_without_recomputation(name: str, recompute: Any) -> None:
    build = model_of(random_and_normalized)
    settings = {} if name == "sharded weights" else {"batch_dependent_layers": "gather"}
    settings = {} if name == "one device" else settings
    if name == "sharded weights":  # BatchNormalization of parts is refused there
        build = model_of(lambda: [*dense(), keras.layers.Dropout(0.4)])
    history, state = trained(build, STRATEGIES[name](**settings))
    again, same = trained(build, STRATEGIES[name](**settings, recompute=recompute))
    small.assert_same_history(again, history, 1e-12)
    small.assert_same_state(same, state, 1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["full", "activations", "larger_than", "list_of_layers"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_layers_of_a_remat_scope_equal_those_outside(name: str, mode: str) -> None:
    history, state = trained(model_of(dense), STRATEGIES[name]())
    again, same = trained(model_of(dense, mode), STRATEGIES[name]())
    small.assert_same_history(again, history, 1e-9)
    small.assert_same_state(same, state, 1e-9)


@pytest.mark.extended
def test_a_step_compiled_by_xla_recomputes() -> None:
    strategy = tfpar.SingleDevice("CPU:0", recompute=True)
    small.assert_trains_as_one_device(model_of(dense, jit_compile=True), data, lambda: strategy, 1e-9)


class Counting(keras.layers.Layer):
    """Multiplies by a number whose computation is counted; the backward pass needs it."""

    def __init__(self, count: Callable[[int], None], **settings: Any) -> None:
        super().__init__(**settings)
        self.count = count

    def call(self, inputs: Any) -> Any:
        def one(_: Any) -> np.ndarray:
            self.count(1)
            return np.ones((), "float64")

        factor = tf.numpy_function(one, [tf.stop_gradient(inputs[:1, :1])], tf.float64, stateful=False)
        return inputs * tf.ensure_shape(factor, ())


@pytest.mark.parametrize(
    ("name", "recompute", "computed"),
    [
        *(
            ("one device", recompute, number)
            for recompute, number in ((False, 1), (True, 2), (["co*"], 2), (["de*"], 1))
        ),
        ("replicas", [Counting], 4),
        ("sharded weights", ["counting"], 4),
    ],
    ids=str,
)
def test_only_chosen_layers_are_computed_again(name: str, recompute: Any, computed: int) -> None:
    counts: list[int] = []

    def build() -> keras.Model:
        layers = [keras.layers.Dense(8), Counting(counts.append, name="counting"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    strategy = STRATEGIES[name](recompute=recompute)
    trainer = tfpar.Trainer(build, strategy, seed=0)
    batches = tf.data.Dataset.from_tensors((parity_cases.inputs(8), np.zeros((8, 1)))).repeat()
    trainer.fit(batches, steps_per_epoch=1, verbose=0)
    counts.clear()
    trainer.fit(batches, steps_per_epoch=3, verbose=0)
    assert len(counts) == 3 * computed


def test_a_strategy_says_that_it_recomputes() -> None:
    assert STRATEGIES["one device"](recompute=True).describe() == "SingleDevice on CPU:0, recomputing"
    assert STRATEGIES["replicas"](recompute=BLOCKS).describe().endswith(", recomputing")
    assert "recomputing" not in STRATEGIES["sharded weights"]().describe()


@pytest.mark.parametrize("recompute", ["block_0", 1, [1], [keras.losses.Loss], None], ids=repr)
def test_other_values_are_refused(recompute: Any) -> None:
    with pytest.raises(TypeError, match=r"recompute must be True, False, or a list of layer names"):
        tfpar.SingleDevice(recompute=recompute)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("blok_0", r"received 'blok_0', which is none of the model .* Did you mean block_0\?"),
        (keras.layers.Conv2D, r"received 'Conv2D', which is none of the model"),
    ],
)
@pytest.mark.parametrize("name", ["replicas", "sharded weights"])
def test_a_layer_that_the_model_lacks_is_refused(name: str, entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(model_of(dense), STRATEGIES[name](recompute=[entry]))
