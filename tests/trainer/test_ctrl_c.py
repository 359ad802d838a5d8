"""Ctrl-C and SIGTERM in `fit`: a checkpoint after the step, and then the end that Python gives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import tfpar
from tests.support import small

pytestmark = pytest.mark.usefixtures("logical_cpus")
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Send(keras.callbacks.Callback):
    """Sends signals to this process after the second step."""

    single_batches = True

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = numbers

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            for place, number in enumerate(self._numbers):
                time.sleep(0.6 if place else 0)  # one that follows at once is the same request
                os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_pythons_own_again() -> Iterator[None]:
    before = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.default_int_handler, signal.SIG_DFL]
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def fit(trainer: tfpar.Trainer, folder: Path | None, *numbers: int) -> None:
    """Train for two epochs."""
    checkpoints = None if folder is None else tfpar.Checkpoints(folder, every_seconds=1000)
    trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[Send(*numbers)], checkpoints=checkpoints)


def new_trainer(strategy: Callable[[], tfpar.Strategy] = tfpar.SingleDevice) -> tfpar.Trainer:
    return tfpar.Trainer(small.build_model, strategy(), seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.STRATEGIES.values(), ids=small.STRATEGIES)
def test_ctrl_c_writes_a_checkpoint_from_which_fit_resumes(
    strategy: Callable[[], tfpar.Strategy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(whole := new_trainer(strategy), None)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped := new_trainer(strategy), tmp_path, signal.SIGINT)
    assert stopped.interrupted
    assert "Stopping after this step; press Ctrl-C again to stop at once." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]
    fit(resumed := new_trainer(strategy), tmp_path)
    small.assert_same_state(small.state(resumed.model), small.state(whole.model))


def test_sigterm_writes_a_checkpoint_and_ends_the_program(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        fit(new_trainer(), tmp_path, signal.SIGTERM, signal.SIGTERM)
    assert raised.value.code == 130, "as an interrupted run of the train command"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(new_trainer(), tmp_path, signal.SIGINT, signal.SIGINT)
    assert not list(tmp_path.iterdir()), "it did not wait for a checkpoint"


def test_without_checkpoints_ctrl_c_stops_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = new_trainer()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, None, signal.SIGINT)
    assert not trainer.interrupted
    assert capsys.readouterr().err == ""


def test_a_handler_of_the_program_is_called(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        fit(new_trainer(), tmp_path, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM] * 2, "in both epochs, as the program trains on"


def test_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: fit(new_trainer(), tmp_path))
    thread.start()
    thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020.npz"], "it ends as in the main thread"
