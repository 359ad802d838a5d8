"""Weights and optimizer state are on the device of their stage, with the initial values of one device."""

from __future__ import annotations

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfpar
from tests.support.pipeline_models import crossentropy, deep, labelled, sequential
from tests.support.small import assert_same_state, state

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_weights_and_optimizer_state_live_on_the_device_of_their_stage(tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = deep()
        model.compile(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), crossentropy())
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(3, 2, balance=[1, 2, 1]), seed=0)
    homes = dict(zip((layer.name for layer in trainer.model.layers), (0, 1, 1, 2), strict=True))
    assert _homes(trainer.model, homes) == 8
    trainer.fit(labelled(), verbose=0)
    assert _homes(trainer.model, homes) == 8 * 5
    trainer.save(tmp_path / "model.keras")
    # A model with optimizer state moves as a whole, to where another pipeline wants it.
    again = tfpar.Trainer(
        lambda: keras.models.load_model(tmp_path / "model.keras"), tfpar.Pipeline(2, 2, balance=[1, 3]), seed=0
    )
    homes = dict(zip(homes, (0, 1, 1, 1), strict=True))
    assert _homes(again.model, homes) == 8 * 5
    assert_same_state(state(again.model), state(trainer.model))


def test_slots_of_another_shape_live_with_their_weight() -> None:
    def build() -> keras.Model:
        model = deep()
        model.compile(keras.optimizers.Adafactor(), crossentropy())
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(3, 2, balance=[1, 2, 1]), seed=0)
    trainer.fit(labelled(), verbose=0)
    optimizer = trainer.model.optimizer
    for slots in (optimizer._r, optimizer._c, optimizer._v):
        for weight, slot in zip(trainer.model.trainable_variables, slots, strict=True):
            assert slot.value.device == weight.value.device, slot.path


def _homes(model: keras.Model, homes: dict[str, int]) -> int:
    """Check on which device each variable of a layer is, and return how many there are."""
    count = 0
    for variable, (layer, home) in itertools.product([*model.variables, *model.optimizer.variables], homes.items()):
        if f"{layer}/" in variable.path or f"{layer}_kernel" in variable.path or f"{layer}_bias" in variable.path:
            assert variable.value.device.endswith(f"CPU:{home}"), variable.path
            count += 1
    return count


def test_initial_weights_are_those_of_one_device_whatever_draws_them() -> None:
    def build() -> keras.Model:
        generator = keras.random.SeedGenerator(5)
        draws = [
            keras.initializers.RandomNormal(seed=generator),
            lambda shape, dtype=None: np.random.normal(size=shape),
            keras.initializers.RandomNormal(seed=generator),
            lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype),
        ]
        parts = [layers.Dense(8, kernel_initializer=draw) for draw in draws]
        for part in reversed(parts):  # in another order than that of the model
            part.build((None, 8))
        parts[0].set_weights(parts[1].get_weights())
        model = keras.Sequential([keras.Input((8,)), *parts])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    keras.utils.set_random_seed(0)
    expected = build().get_weights()
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
    assert_same_state(trainer.model.get_weights(), expected)


def test_one_strategy_serves_several_models() -> None:
    strategy = tfpar.Pipeline(2, 2, balance="parameters")
    first, second = (tfpar.Trainer(build, strategy, seed=0) for build in (deep, sequential()))
    histories = [trainer.fit(labelled(), verbose=0).history["loss"] for trainer in (first, second, first)]
    assert histories[2] < histories[0] != histories[1]
