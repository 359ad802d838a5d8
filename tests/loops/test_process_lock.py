"""Threads of a process that train at once give the results of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest

import tfpar
from tfpar import process_lock

pytestmark = pytest.mark.usefixtures("logical_cpus")

INPUTS = np.linspace(-1, 1, 10 * 4, dtype="float32").reshape(10, 4)
TARGETS = INPUTS[:, :2] ** 2
STRATEGIES: list[Callable[[], tfpar.Strategy]] = [
    lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
    lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"]),
    tfpar.SingleDevice,
]


def build_model() -> keras.Model:
    """Return a model of two layers."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def test_threads_that_build_and_train_at_once_give_the_losses_of_one_device() -> None:
    keras.utils.set_random_seed(3)
    expected = build_model().fit(INPUTS, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    losses: dict[int, list[float]] = {}

    def train(number: int) -> None:
        trainer = tfpar.Trainer(build_model, STRATEGIES[number](), seed=3)
        history = trainer.fit(INPUTS, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
        losses[number] = history.history["loss"]

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(len(STRATEGIES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(losses) == [0, 1, 2]
    for one in losses.values():
        np.testing.assert_allclose(one, expected, rtol=1e-5)


def test_a_thread_predicts_while_another_one_trains() -> None:
    trained, other = (tfpar.Trainer(build_model, tfpar.SingleDevice(), seed=0) for _ in range(2))
    other.predict(INPUTS, verbose=0)
    begins, ends = threading.Event(), threading.Event()
    epochs: list[int] = []

    class Counts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            begins.set()
            epochs.append(epoch)
            self.model.stop_training = ends.is_set()

    fit = threading.Thread(
        target=trained.fit,
        args=(INPUTS, TARGETS),
        kwargs={"epochs": 100_000, "callbacks": [Counts()], "verbose": 0},
        daemon=True,
    )
    fit.start()
    assert begins.wait(60)
    before = len(epochs)
    for _ in range(3):
        other.predict(INPUTS, verbose=0)
    ends.set()
    fit.join(60)
    assert not fit.is_alive()
    assert len(epochs) > before


def test_a_generator_may_predict_with_another_trainer() -> None:
    trained, teacher = (tfpar.Trainer(build_model, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=0) for _ in range(2))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in (0, 4):
            inputs = INPUTS[first : first + 4]
            yield inputs, teacher.predict(inputs, verbose=0)

    found: list[float] = []
    fit = threading.Thread(target=lambda: found.extend(trained.fit(batches(), verbose=0).history["loss"]), daemon=True)
    fit.start()
    fit.join(60)
    assert np.isfinite(found).tolist() == [True]


@pytest.mark.parametrize(("kept", "enters"), [(False, True), (True, False)])
def test_another_thread_enters_during_a_pause_unless_a_model_is_built(kept: bool, enters: bool) -> None:
    entered = threading.Event()

    def enter() -> None:
        with process_lock.ProcessLock():
            entered.set()

    other = threading.Thread(target=enter, daemon=True)
    with process_lock.ProcessLock(kept), process_lock.ProcessLock():
        other.start()
        assert not entered.wait(0.2)
        with process_lock.paused():
            assert entered.wait(10 if enters else 0.2) == enters
    other.join(10)
    assert entered.is_set()
