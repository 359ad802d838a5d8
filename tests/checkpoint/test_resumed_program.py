"""What `fit` says where it resumes: one line, and a warning for each argument that the checkpoint overrides."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

import tfpar
from tests.checkpoint.test_checkpoint import InterruptAt
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")


def fit(
    folder: Path, rate: float = 0.1, seed: int = 0, interrupt_at: int | None = None, **settings: Any
) -> tfpar.Trainer:
    """Train in a new trainer, as a new process would."""
    build = parity_cases.classifier(lambda: keras.optimizers.SGD(rate))
    trainer = tfpar.Trainer(build, tfpar.SingleDevice(), seed=seed)
    lower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0)
    settings = {"verbose": 0, "callbacks": [lower, InterruptAt(trainer, interrupt_at)], **settings}
    trainer.fit(small.data(), checkpoints=tfpar.Checkpoints(folder), **settings)
    return trainer


def said(capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    lines = capsys.readouterr().out.replace(str(folder), "FOLDER").splitlines()
    return [line for line in lines if "FOLDER" in line]


@pytest.mark.parametrize("verbose", [1, 2])
def test_fit_says_where_it_resumes_and_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verbose: int
) -> None:
    fit(tmp_path, epochs=3, interrupt_at=small.STEPS_PER_EPOCH + 2, verbose=verbose)
    assert said(capsys, tmp_path) == [], "a new run does not resume"
    fit(tmp_path, epochs=2, verbose=verbose)
    resuming = "Resuming after epoch 1 and 2 steps of the next, of 2 epochs, from the checkpoint in FOLDER."
    assert said(capsys, tmp_path) == [resuming]
    fit(tmp_path, epochs=2, verbose=verbose)
    assert said(capsys, tmp_path) == ["Nothing is left to train: the checkpoint in FOLDER is after epoch 2 of 2."]
    fit(tmp_path, epochs=3, verbose=verbose)
    assert said(capsys, tmp_path) == ["Resuming after epoch 2, of 3 epochs, from the checkpoint in FOLDER."]


def test_fit_says_that_a_callback_has_ended_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    for verbose in (0, 2):
        fit(tmp_path, epochs=9, callbacks=[stop], verbose=verbose)
    ended = "Nothing is left to train: a callback has ended the training in FOLDER after epoch 2."
    assert said(capsys, tmp_path) == [ended]


def test_a_silent_fit_resumes_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (1, 2, 2):
        fit(tmp_path, epochs=epochs)
    assert capsys.readouterr().out == ""


def test_a_learning_rate_that_is_ignored_is_a_warning(tmp_path: Path) -> None:
    fit(tmp_path, epochs=2)
    message = r"The learning rate 0.3 is ignored: the run resumes with 0.05, that of its checkpoint. Train in a new fo"
    for epochs in (2, 3):  # the second checkpoint is of a program with the other rate
        with pytest.warns(UserWarning, match=message.replace("0.05", "0.0[0-9]+")):
            fit(tmp_path, rate=0.3, epochs=epochs)


def test_a_seed_that_is_ignored_is_a_warning(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    with pytest.warns(UserWarning, match="seed=1 is ignored except for the order of shuffled arrays: .* of seed=0. Tr"):
        fit(tmp_path, seed=1, epochs=2)


def test_the_same_program_resumes_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = fit(tmp_path, epochs=2)
        trainer.fit(small.data(), epochs=3, verbose=0, checkpoints=tfpar.Checkpoints(tmp_path))
        fit(tmp_path, epochs=4)
