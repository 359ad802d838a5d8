"""The argument `training` of layers is that of Keras, whatever the `call` of a model does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfpar

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DEVICES = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "pipeline": lambda: tfpar.Pipeline(2, 1),
    "shards": lambda: tfpar.TensorParallel(2),
    "replicas": lambda: tfpar.Mirrored(DEVICES),
    "fully sharded": lambda: tfpar.Mirrored(DEVICES, shard="weights"),
    "pipelines of microbatches": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2), num_replicas=2),
}


class Net(keras.Model):
    """A model whose `call` takes no `training`, for which Keras' own steps then pass none."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.first, self.inner, self.last = layers.Dense(8, "relu"), inner, layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.last(self.inner(self.first(inputs)))


class NetWithOptions(Net):
    def call(self, inputs: Any, **kwargs: Any) -> Any:
        return self.last(self.inner(self.first(inputs)))


class NetWithDefault(Net):
    def call(self, inputs: Any, training: bool = True) -> Any:
        return self.last(self.inner(self.first(inputs)))


class NetOfOpposite(Net):
    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.inner(self.first(inputs), training=not training))


class NetOfConstant(Net):
    """Keras gives a `training` that was passed by hand also to the layers after it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.norm, self.other = layers.BatchNormalization(), layers.BatchNormalization()

    def call(self, inputs: Any) -> Any:
        rows = self.norm(self.inner(self.other(self.first(inputs)), training=True))
        return self.last(rows)


class NetAfter(Net):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any) -> Any:
        return self.norm(super().call(inputs))


class Block(layers.Layer):
    """Layers inside a layer without the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.5)

    def call(self, inputs: Any) -> Any:
        return self.drop(self.norm(inputs))


class Trains(layers.Layer):
    """A layer that trains where it is called without `training`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any, training: bool = True) -> Any:
        return self.norm(inputs, training=training)


class BlockOfConstant(layers.Layer):
    """A block that leaves its constant to the layers after it, in Keras, and says its shape without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any) -> Any:
        return self.norm(inputs, training=True)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def functional(inner: Any) -> keras.Model:
    entry = keras.Input((6,))
    return keras.Model(entry, layers.Dense(3)(inner(layers.Dense(8)(entry))))


def constant_in_a_graph() -> keras.Model:
    entry = keras.Input((8,))
    return keras.Model(entry, layers.BatchNormalization()(layers.BatchNormalization()(entry, training=True)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "normalization": lambda: Net(layers.BatchNormalization()),
    "dropout": lambda: Net(layers.Dropout(0.5)),
    "a block": lambda: Net(Block()),
    "a model inside": lambda: Net(Net(layers.BatchNormalization())),
    "a graph inside": lambda: Net(keras.Sequential([layers.BatchNormalization(), layers.Dropout(0.5)])),
    "a constant in a graph inside": lambda: Net(constant_in_a_graph()),
    "a default of a layer": lambda: Net(Trains()),
    "options": lambda: NetWithOptions(layers.BatchNormalization()),
    "a default of the model": lambda: NetWithDefault(layers.BatchNormalization()),
    "the opposite": lambda: NetOfOpposite(layers.BatchNormalization()),
    "a constant": lambda: NetOfConstant(layers.BatchNormalization()),
    "a constant of a block": lambda: Net(NetAfter(BlockOfConstant())),
    "a model in a graph": lambda: functional(Net(layers.BatchNormalization())),
    "a block in a graph": lambda: functional(Net(Block())),
}
DATA = np.random.default_rng(0).normal(size=(32, 6)).astype("float32"), np.arange(32) % 3


def compiled(make: Callable[[], keras.Model]) -> keras.Model:
    model = make()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def results(trained: Any, model: keras.Model) -> list[np.ndarray]:
    """Return the losses of `fit` and `evaluate`, the predictions and the weights."""
    history = trained.fit(*DATA, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    loss = trained.evaluate(*DATA, batch_size=16, verbose=0)
    return [np.array([*history, loss]), trained.predict(DATA[0], batch_size=16, verbose=0), *model.get_weights()]


def assert_as_keras(make: Callable[[], keras.Model], strategy: Any) -> None:
    keras.utils.set_random_seed(0)
    model = compiled(make)
    expected = results(model, model)
    trainer = tfpar.Trainer(lambda: compiled(make), strategy, seed=0)
    for one, other in zip(results(trainer, trainer.model), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["normalization", "dropout"])
def test_layers_of_a_call_without_the_argument_run_as_in_inference(model: str, strategy: str) -> None:
    assert_as_keras(MODELS[model], STRATEGIES[strategy]())


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["pipeline", "shards"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("normalization", "dropout")])
def test_each_layer_receives_the_argument_of_keras(model: str, strategy: str) -> None:
    assert_as_keras(MODELS[model], STRATEGIES[strategy]())
