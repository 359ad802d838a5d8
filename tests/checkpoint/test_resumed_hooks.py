"""A run that resumes within an epoch begins it again: hooks change rates and weights as in an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import pytest

import tfpar
from tests.checkpoint.test_checkpoint import InterruptAt
from tests.support import small

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


@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_weights_that_a_hook_starts_anew_keep_the_steps_since(strategy: str, tmp_path: Path) -> None:
    class StartAnew(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            layer = self.model.layers[-1]
            layer.kernel.assign(0.5 * layer.kernel)

    states = []
    for folder, interrupt_at in ((None, None), (tmp_path, 15), (tmp_path, None)):
        trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy](), seed=0)
        trainer.fit(
            small.data(), epochs=2, verbose=0, checkpoints=None if folder is None else tfpar.Checkpoints(folder),
            callbacks=[StartAnew(), InterruptAt(trainer, interrupt_at)],
        )  # fmt: skip
        states.append(small.state(trainer.model))
    small.assert_same_state(states[2], states[0])
