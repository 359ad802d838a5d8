"""`shard="weights"`: each weight on one device, copies of a block's weights in use, one device's result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import objective_cases, parity_cases, small
from tfpar.placement.owners import num_bytes

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
NUM_LAYERS = 6


def sharded(num_replicas: int = 3) -> Any:
    return tfpar.Mirrored(DEVICES[:num_replicas], shard="weights")


def classifier(optimizer: Any = "adam", frozen: bool = False) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(16, "tanh", trainable=not frozen) for _ in range(NUM_LAYERS)]
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=["accuracy"])
        return model

    return build


def state(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_as_one_device(build: Any, data: Any, num_replicas: int = 3, **fit: Any) -> None:
    found = []
    for strategy in (tfpar.SingleDevice(), sharded(num_replicas)):
        trainer = tfpar.Trainer(build, strategy, seed=0)
        history = trainer.fit(data, epochs=2, verbose=0, **fit).history
        found.append((history, state(trainer.model), trainer.evaluate(data, verbose=0)))
    (history, arrays, evaluated), (of_shards, arrays_of_shards, evaluated_shards) = found
    for name, values in history.items():
        np.testing.assert_allclose(of_shards[name], values, rtol=1e-4)
    np.testing.assert_allclose(evaluated_shards, evaluated, rtol=1e-4)
    for one, other in zip(arrays, arrays_of_shards, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


OPTIMIZERS = {
    "norm, average": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, 0.9, clipnorm=0.1, gradient_accumulation_steps=2),
    "whole tensors": lambda: keras.optimizers.Adafactor(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01), 1024.0, 3),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_state_and_logs_are_those_of_one_device(name: str) -> None:
    assert_as_one_device(classifier(OPTIMIZERS[name]), small.data())  # the last batch is smaller than the replicas


def bytes_on_devices(variables: Any) -> list[int]:
    sizes = [0, 0, 0]
    for variable in variables:
        sizes[DEVICES.index(variable.value.device[-5:])] += num_bytes(variable)
    return sizes


def test_each_device_holds_about_the_same_bytes_and_the_preview_shows_them() -> None:
    trainer = tfpar.Trainer(classifier(), sharded(), seed=0)
    preview = trainer.preview(small.data())
    weights, slots = trainer.model.variables, trainer.model.optimizer.variables
    held = bytes_on_devices(weights)
    largest = max(map(num_bytes, weights))
    assert max(held) - min(held) <= largest
    two_blocks = 2 * (largest + 16 * 4)
    expected = [a + b + a for a, b in zip(held, bytes_on_devices(slots), strict=True)]
    assert [row.state_bytes - two_blocks for row in preview.rows] == expected
    assert f"weights sharded, in {NUM_LAYERS + 1} blocks" in str(preview)
    assert "of weights are copied to each device in every step" in str(preview)


def test_a_saved_model_continues_in_plain_keras(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(classifier(OPTIMIZERS["norm, average"]), sharded(2), seed=0)
    trainer.fit(small.data(), verbose=0)
    trainer.save(tmp_path / "model.keras")
    loaded, inputs = keras.models.load_model(tmp_path / "model.keras"), parity_cases.inputs(20)
    small.assert_same_state(state(loaded), state(trainer.model))
    np.testing.assert_allclose(
        loaded.predict(inputs, verbose=0), trainer.predict(inputs, verbose=0), rtol=1e-4, atol=1e-6
    )
    histories = [one.fit(small.data(), verbose=0).history for one in (loaded, trainer)]
    small.assert_same_history(*histories, tolerance=1e-4)
    small.assert_same_state(state(loaded), state(trainer.model), 1e-4)


def test_one_worker_shards_weights_over_its_devices() -> None:
    strategy = tfpar.MultiWorker(["CPU:1", "CPU:2"], shard="weights")
    assert strategy.describe() == "MultiWorker over 1 worker, 2 replicas on CPU:1, CPU:2, weights sharded"


class OfBatch(keras.layers.Layer):
    """A layer that no replica can compute."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


@pytest.mark.parametrize(
    ("layer", "way_out"),
    [
        (
            lambda: OfBatch(lambda rows: rows - keras.ops.mean(rows, axis=0)),
            r'its batch; train with shard="optimizer" and batch_dependent_layers="gather", or on SingleDevice\(\)\.$',
        ),
        (lambda: OfBatch(lambda rows: keras.ops.reshape(rows, (8, 3))), r"in a reshape, or train on SingleDevice\(\)"),
        (lambda: OfBatch(lambda rows: rows * np.random.rand()), r"in the constructor, or train on SingleDevice\(\)"),
        (
            lambda: keras.layers.BatchNormalization(synchronized=True),
            r'by itself, or train with shard="optimizer" and batch_dependent_layers="gather", or on SingleDevice\(\)',
        ),
    ],
)
def test_an_error_names_no_setting_of_pipelines(layer: Callable[[], keras.layers.Layer], way_out: str) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), layer()])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=way_out) as refused:
        tfpar.Trainer(build, sharded(2)).fit(np.ones((8, 3)), np.ones((8, 3)), batch_size=8, verbose=0)
    assert "num_microbatches" not in str(refused.value)
    assert "allow_batch_dependent_layers" not in str(refused.value)


def test_a_model_that_a_pipeline_cannot_train_is_refused_with_the_way_out() -> None:
    message = (
        r"""shard="weights" trains with the loss of compile, and GAN has objectives.*also with shard='optimizer'"""
    )
    with pytest.raises(ValueError, match=message):
        tfpar.Trainer(objective_cases.gan, sharded(), seed=0).fit(objective_cases.CASES["GAN"].data(), verbose=0)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
        lambda: tfpar.Hybrid(tfpar.TensorParallel(2), num_replicas=2),
    ],
    ids=["weights sharded", "replicas of shards"],
)
def test_the_way_out_of_a_static_batch_has_no_setting_of_pipelines(strategy: Callable[[], tfpar.Strategy]) -> None:
    def stateful() -> keras.Model:
        layers = [keras.layers.GRU(4, stateful=True), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((4, 6), batch_size=8), *layers])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"SingleDevice\(\)|without replicas") as raised:
        tfpar.Trainer(stateful, strategy(), seed=0).fit(np.ones([16, 4, 6]), np.ones([16, 8]), batch_size=8, verbose=0)
    assert "num_microbatches" not in str(raised.value)
