"""Steps that Python launches one by one, as on GPUs, train as those of a compiled loop; logical CPUs stand for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tfpar.engines.steps import launched_steps

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {**small.STRATEGIES, **small.SPLITTING_STRATEGIES}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launch all steps; return the number of steps of each call."""
    monkeypatch.setattr(launched_steps, "suits", lambda devices: True)
    run, calls = launched_steps.LaunchedSteps.__call__, list[int]()

    def counted(*arguments: Any) -> Any:
        result = run(*arguments)
        calls.append(result.num_steps)
        return result

    monkeypatch.setattr(launched_steps.LaunchedSteps, "__call__", counted)
    return calls


@pytest.mark.few(1)
@each_strategy
def test_training_and_evaluation_equal_those_of_keras(strategy: str, launched: list[int]) -> None:
    small.assert_trains_as_one_device(small.build_model, small.data, STRATEGIES[strategy])
    assert sum(launched) == 30, "two epochs and an evaluation"


@pytest.mark.few(1)
@pytest.mark.parametrize("steps_per_call", [1, 4, 100])
@each_strategy
def test_epochs_follow_one_another_in_endless_data(strategy: str, steps_per_call: int) -> None:
    expected = small.initial_model()
    wanted = expected.fit(small.data().repeat(), epochs=3, steps_per_epoch=7, verbose=0).history
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    found = trainer.fit(small.data().repeat(), epochs=3, steps_per_epoch=7, verbose=0, steps_per_call=steps_per_call)
    small.assert_same_history(found.history, wanted)
    small.assert_same_state(small.state(trainer.model), small.state(expected), 1e-5)


@pytest.mark.few(1)
@each_strategy
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    def trainer() -> tfpar.Trainer:
        return tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)

    def fit(trainer: tfpar.Trainer, folder: str, **settings: Any) -> None:
        checkpoints = tfpar.Checkpoints(tmp_path / folder, every_seconds=0)
        trainer.fit(small.shuffled(), epochs=2, steps_per_call=3, verbose=0, checkpoints=checkpoints, **settings)

    first, whole = trainer(), trainer()
    interrupts = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: first.interrupt() if batch == 5 else None
    )
    fit(first, "resumed", callbacks=[interrupts])
    resumed = trainer()
    fit(resumed, "resumed")
    fit(whole, "whole")
    assert int(first.model.optimizer.iterations.numpy()) == 6
    small.assert_same_state(small.state(resumed.model), small.state(whole.model))


@pytest.mark.few(1)
@pytest.mark.parametrize("steps_per_call", [1, 100])
@each_strategy
def test_the_step_is_named_whose_loss_is_not_finite(strategy: str, steps_per_call: int) -> None:
    inputs = parity_cases.inputs(73)
    inputs[41] = np.nan  # the sixth batch
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    with pytest.raises(FloatingPointError, match=r"is not at step 6 \(step 6 of epoch 1\)"):
        trainer.fit(
            inputs, parity_cases.labels(73), batch_size=8, shuffle=False, verbose=0, steps_per_call=steps_per_call
        )


@pytest.mark.few(1)
@each_strategy
def test_a_callback_that_stops_at_a_loss_that_is_not_finite_stops_the_call(strategy: str) -> None:
    inputs = parity_cases.inputs(73)
    inputs[41] = np.nan
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    trainer.fit(
        inputs, parity_cases.labels(73), batch_size=8, shuffle=False, verbose=0, steps_per_call=100,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )  # fmt: skip
    assert int(trainer.model.optimizer.iterations.numpy()) == 6


@pytest.mark.few(1)
@each_strategy
def test_an_error_of_a_step_is_that_of_its_operation(strategy: str) -> None:
    labels = parity_cases.labels(73)
    labels[41] = 77
    trainer = tfpar.Trainer(small.build_model, STRATEGIES[strategy](), seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="77"):
        trainer.fit(parity_cases.inputs(73), labels, batch_size=8, shuffle=False, verbose=0)


class LogsOutputs(keras.Model):
    """Logs a vector for each batch, of the size of the batch."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "first": y_pred[:, 0]}


def test_the_logs_of_a_batch_of_another_size_are_those_of_that_batch() -> None:
    def build() -> keras.Model:
        features = keras.Input((parity_cases.NUM_FEATURES,))
        model = LogsOutputs(features, keras.layers.Dense(3)(features))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return model

    sizes: list[int] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: sizes.append(np.size(logs["first"])))
    trainer = tfpar.Trainer(build, tfpar.SingleDevice(), seed=0)
    trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[note])
    assert sizes == [*[8] * 9, 1] * 2
