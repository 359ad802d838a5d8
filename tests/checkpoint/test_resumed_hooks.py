"""A run that resumes within an epoch begins it again: hooks change rates and weights as in an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest

import tfpar
from tests.checkpoint.test_checkpoint import InterruptAt
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")


def fit(
    strategy: str, schedule: Callable[[int, float], float], folder: Path | None = None, interrupt_at: int | None = None
) -> tfpar.Trainer:
    """Train for three epochs of ten steps."""
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy](), seed=0)
    trainer.fit(
        small.data(), epochs=3, verbose=0, checkpoints=None if folder is None else tfpar.Checkpoints(folder),
        callbacks=[keras.callbacks.LearningRateScheduler(schedule), InterruptAt(trainer, interrupt_at)],
    )  # fmt: skip
    return trainer


def lowered(epoch: int, rate: float) -> float:
    return rate * 0.7


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.STRATEGIES)
@pytest.mark.parametrize("interrupt_at", [7, 10, 15])
def test_a_rate_that_is_lowered_by_a_factor_is_not_lowered_twice(
    strategy: str, interrupt_at: int, tmp_path: Path
) -> None:
    expected = fit(strategy, lowered)
    assert fit(strategy, lowered, tmp_path, interrupt_at).interrupted
    resumed = fit(strategy, lowered, tmp_path)
    small.assert_same_state(small.state(resumed.model), small.state(expected.model))


def test_the_rate_that_a_hook_changed_in_a_batch_stays(tmp_path: Path) -> None:
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == 5:
                self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2

    rates = []
    for folder, interrupt_at in ((None, None), (tmp_path, 15), (tmp_path, None)):
        trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
        trainer.fit(
            small.data(), epochs=2, verbose=0, checkpoints=None if folder is None else tfpar.Checkpoints(folder),
            callbacks=[
                keras.callbacks.LearningRateScheduler(lowered), Halve(), InterruptAt(trainer, interrupt_at)
            ],
        )  # fmt: skip
        rates.append(float(trainer.model.optimizer.learning_rate))
    assert rates[2] == rates[0]


def test_a_changed_hook_takes_effect_in_the_resumed_epoch(tmp_path: Path) -> None:
    assert fit("single_device", lambda epoch, rate: 0.05, tmp_path, 15).interrupted
    resumed = fit("single_device", lambda epoch, rate: 0.02 if epoch == 1 else rate, tmp_path)
    assert float(resumed.model.optimizer.learning_rate) == pytest.approx(0.02)


@pytest.mark.extended
def test_weights_that_a_hook_starts_anew_keep_the_steps_since(tmp_path: Path) -> None:
    class StartAnew(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            layer = self.model.layers[-1]
            layer.kernel.assign(0.5 * layer.kernel)

    states = []
    for folder, interrupt_at in ((None, None), (tmp_path, 15), (tmp_path, None)):
        trainer = tfpar.Trainer(small.build_model, small.STRATEGIES["mirrored"](), seed=0)
        trainer.fit(
            small.data(), epochs=2, verbose=0, checkpoints=None if folder is None else tfpar.Checkpoints(folder),
            callbacks=[StartAnew(), InterruptAt(trainer, interrupt_at)],
        )  # fmt: skip
        states.append(small.state(trainer.model))
    small.assert_same_state(states[2], states[0])


def normalized() -> keras.Model:
    """A model with a scalar weight, the count of examples of Normalization."""
    normalization = keras.layers.Normalization()
    normalization.adapt(parity_cases.inputs(20))
    layers = [keras.Input((parity_cases.NUM_FEATURES,)), normalization, keras.layers.Dense(parity_cases.NUM_CLASSES)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert any(np.ndim(weight) == 0 for weight in model.get_weights())
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_that_resumes_restores_the_best_weights_of_before(precision: str, tmp_path: Path) -> None:
    keras.config.set_dtype_policy(precision)
    try:
        states = []
        for folder, interrupt_at in ((None, None), (tmp_path, 25), (tmp_path, None)):
            trainer = tfpar.Trainer(normalized, tfpar.SingleDevice(), seed=0)
            best = keras.callbacks.EarlyStopping("loss", mode="max", patience=5, restore_best_weights=True)
            trainer.fit(
                small.data(), epochs=3, verbose=0, callbacks=[best, InterruptAt(trainer, interrupt_at)],
                checkpoints=None if folder is None else tfpar.Checkpoints(folder),
            )  # fmt: skip
            assert best.best_epoch == 0, "the best weights are those of before the interruption"
            states.append(small.state(trainer.model))
        small.assert_same_state(states[2], states[0])
    finally:
        keras.config.set_dtype_policy("float32")


REMEMBERED = {
    "a number": 5,
    "a number that is true": True,
    "an array of no dimension": np.array(3, "int64"),
    "an array": np.arange(6, dtype="float16").reshape(2, 3),
    "an array of bools": np.array([True, False]),
    "an array of text": np.array(["a", "longer"]),
    "an array of bfloat16": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "an array of bfloat16 of no dimension": np.array(1.5, ml_dtypes.bfloat16),
    "an empty array": np.zeros((0, 3), "uint8"),
    "NumPy's true": np.True_,
    "a NumPy int": np.int32(-7),
    "a NumPy float": np.float64(0.1),
    "a NumPy float that is no number": np.float32("nan"),
    "a NumPy bfloat16": ml_dtypes.bfloat16(1.5),
    "a NumPy complex": np.complex64(1 + 2j),
    "a NumPy text": np.str_("text"),
    "an empty NumPy text": np.str_(""),
    "NumPy bytes": np.bytes_(b"bytes"),
    "a date": np.datetime64("2026-11-22"),
    "a list": [1, np.float32(2.5), np.array(1.0), {"name": np.int8(1)}],
}


def test_a_callback_remembers_values_of_each_type(tmp_path: Path) -> None:
    class Remembers(keras.callbacks.Callback):
        values: dict[str, Any]

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.values = dict(REMEMBERED)
                self.objects = np.array([print, None])  # not state

    for interrupt_at in (15, None):
        trainer, remembers = tfpar.Trainer(small.build_model, seed=0), Remembers()
        trainer.fit(
            small.data(), epochs=2, verbose=0, callbacks=[remembers, InterruptAt(trainer, interrupt_at)],
            checkpoints=tfpar.Checkpoints(tmp_path),
        )  # fmt: skip
    assert set(remembers.values) == set(REMEMBERED)
    for name, value in REMEMBERED.items():
        assert_same(remembers.values[name], value, name)


def assert_same(value: Any, expected: Any, name: str) -> None:
    assert type(value) is type(expected), name
    if isinstance(expected, list | dict):
        assert len(value) == len(expected), name
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(value[key], expected[key], name)
    else:
        assert getattr(value, "dtype", None) == getattr(expected, "dtype", None), name
        np.testing.assert_array_equal(value, expected, strict=True, err_msg=name)
