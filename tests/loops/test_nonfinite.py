"""A loss that is not finite: training stops with the step named, or continues as Keras does, by choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops.test_hooks import STRATEGIES, Recorder, assert_same_events
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def poisoned(batch: int = 2) -> tf.data.Dataset:
    """Five batches, one of which has a target that is no number."""
    targets = (parity_cases.labels(40) > 0).astype("float32")[:, None]
    targets[8 * batch + 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((parity_cases.inputs(40), targets)).batch(8)


def sound() -> tf.data.Dataset:
    return poisoned().map(lambda inputs, targets: (inputs, tf.math.multiply_no_nan(targets, 0.0)))


def build(steps_per_execution: int = 1) -> keras.Model:
    """A model whose weights stay finite after a loss that is not: nothing of it flows back."""

    def loss(targets: Any, outputs: Any) -> Any:
        return keras.ops.square(outputs) + keras.ops.stop_gradient(targets)

    layers = [keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


class Both:
    """A trainer and its model's twin under Keras alone, set back for every test."""

    def __init__(self, strategy: str, steps_per_execution: int) -> None:
        self.trainer = tfpar.Trainer(lambda: build(steps_per_execution), STRATEGIES[strategy](), seed=0)
        keras.utils.set_random_seed(0)
        self.keras = build(steps_per_execution)
        self._again = [small.Again(self.trainer.model), small.Again(self.keras)]

    def reset(self) -> Both:
        for again in self._again:
            again.reset()
        return self

    def fit(self, data: Any, *, callbacks: Any = list, only_tfpar: dict[str, Any], **settings: Any) -> list[Any]:
        """Train under both, with the same losses and weights; return the callbacks of both, Keras' first."""
        made = [callbacks(), callbacks()]
        expected = self.keras.fit(data, verbose=0, callbacks=made[0], **settings).history
        history = self.trainer.fit(data, verbose=0, callbacks=made[1], **settings, **only_tfpar).history
        small.assert_same_history(history, expected)
        small.assert_same_state(small.state(self.trainer.model), small.state(self.keras), 1e-5)
        return made


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, logical_cpus: list[str]) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(strategy: str) -> Both:
    return Both(strategy, 1)


@pytest.fixture
def both(compiled: Both) -> Both:
    return compiled.reset()


@pytest.mark.few(1)
@pytest.mark.parametrize("steps_per_call", [None, 1, 100])
def test_training_continues_as_under_keras(both: Both, steps_per_call: int | None) -> None:
    only_tfpar = {"nonfinite_loss": "continue", "steps_per_call": steps_per_call}
    both.fit(poisoned(), epochs=2, only_tfpar=only_tfpar)
    assert int(both.trainer.model.optimizer.iterations.numpy()) == 10


@pytest.mark.few(1)
def test_a_validation_that_is_not_finite_does_not_end_the_training(both: Both) -> None:
    both.fit(sound(), epochs=2, validation_data=poisoned(), only_tfpar={"nonfinite_loss": "continue"})
    assert both.trainer.model.optimizer.iterations.numpy() == 10


@pytest.mark.few(2)
def test_by_default_the_step_and_the_validation_are_named_with_the_way_to_continue(both: Both) -> None:
    message = r"is not at step 3 \(step 3 of epoch 1\)\. .* nonfinite_loss=\"continue\" trains on, as Keras does\."
    with pytest.raises(FloatingPointError, match=message):
        both.trainer.fit(poisoned(), verbose=0)
    message = r"val_loss is nan after epoch 1\. .* nonfinite_loss=\"continue\" trains on"
    with pytest.raises(FloatingPointError, match=message):
        both.trainer.fit(sound(), validation_data=poisoned(), verbose=0)


@pytest.mark.parametrize("steps_per_call", [1, 2, 100])
def test_the_step_is_named_that_was_not_finite_wherever_its_call_ends(both: Both, steps_per_call: int) -> None:
    both.trainer.fit(sound(), verbose=0)
    with pytest.raises(FloatingPointError, match=r"is not at step 8 \(step 3 of epoch 1\)\."):
        both.trainer.fit(poisoned(), verbose=0, steps_per_call=steps_per_call)


def test_updates_are_counted_where_gradients_are_accumulated() -> None:
    def accumulating() -> keras.Model:
        model = build()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), model.loss)
        return model

    trainer = tfpar.Trainer(accumulating, tfpar.SingleDevice(), seed=0)
    with pytest.raises(FloatingPointError, match=r"is not at step 2 \(step 4 of epoch 1\)\."):
        trainer.fit(poisoned(3), verbose=0, steps_per_call=100)


def test_checkpoints_are_written_while_training_continues(both: Both, tmp_path: Path) -> None:
    checkpoints = tfpar.Checkpoints(tmp_path, every_seconds=0)
    settings: dict[str, Any] = {"nonfinite_loss": "continue", "steps_per_call": 1, "checkpoints": checkpoints}
    both.trainer.fit(poisoned(), verbose=0, **settings)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "step-00000005.npz"


def test_another_word_is_refused(both: Both) -> None:
    with pytest.raises(ValueError, match="nonfinite_loss must be 'stop' or 'continue', received 'ignore'"):
        both.trainer.fit(sound(), verbose=0, nonfinite_loss="ignore")  # type: ignore[arg-type]


# --- the callback that decides


@pytest.mark.few(1)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_terminate_on_nan_ends_the_training_as_under_keras(
    strategy: str, compiled: Both, choice: str, steps_per_execution: int, capsys: pytest.CaptureFixture[str]
) -> None:
    both = compiled.reset() if steps_per_execution == 1 else Both(strategy, steps_per_execution)
    made = both.fit(
        poisoned(),
        epochs=3,
        validation_data=sound(),
        callbacks=lambda: [keras.callbacks.TerminateOnNaN(), Recorder()],
        only_tfpar={"nonfinite_loss": choice},
    )
    assert_same_events(made[1][1].events, made[0][1].events)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == f"Batch {2 if steps_per_execution == 1 else 3}: Invalid loss, terminating training"


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_terminate_on_nan_sees_the_step_in_a_call_of_many(
    both: Both, choice: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    both.trainer.fit(
        poisoned(), verbose=0, callbacks=keras.callbacks.TerminateOnNaN(), nonfinite_loss=choice, steps_per_call=100
    )
    assert capsys.readouterr().out == "Batch 2: Invalid loss, terminating training\n"
    assert int(both.trainer.model.optimizer.iterations.numpy()) == 3
