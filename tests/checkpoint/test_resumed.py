"""A run resumes with the data of its checkpoint: other data are refused within an epoch, and taken where one begins."""

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

EXAMPLES = 64


def fit(strategy: str, folder: Path, batch_size: int, interrupt_at: int | None = None, **settings: Any) -> int:
    """Train on 64 examples, and return the steps of the run in all."""
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy](), seed=0)
    trainer.fit(
        parity_cases.inputs(EXAMPLES), parity_cases.labels(EXAMPLES), batch_size=batch_size, verbose=0,
        callbacks=[InterruptAt(trainer, interrupt_at)], checkpoints=tfpar.Checkpoints(folder), **settings,
    )  # fmt: skip
    return int(trainer.model.optimizer.iterations.numpy())


@pytest.mark.parametrize("strategy", ["single_device", pytest.param("mirrored", marks=pytest.mark.extended)])
def test_another_batch_size_within_an_epoch_is_refused(strategy: str, tmp_path: Path) -> None:
    """Half of the examples would never be trained on: four batches of 16 are all, and four of 8 were read."""
    fit(strategy, tmp_path, 8, interrupt_at=4)
    written, now = "8 steps with batches of 8 examples", "4 steps with batches of 16 examples"
    with pytest.raises(ValueError, match=f"after step 4 of an epoch of {written}, received an epoch of {now}"):
        fit(strategy, tmp_path, 16)
    assert fit(strategy, tmp_path, 8) == 8, "the same data resume"


def test_another_batch_size_is_taken_where_an_epoch_begins(tmp_path: Path) -> None:
    assert fit("single_device", tmp_path, 8, epochs=1) == 8
    assert fit("mirrored", tmp_path, 16, epochs=2) == 8 + 4


def test_another_batch_size_alone_is_a_warning(tmp_path: Path) -> None:
    """Datasets of batches of several sizes may begin with another one each time."""
    fit("single_device", tmp_path, 8, interrupt_at=2, steps_per_epoch=4)
    with pytest.warns(UserWarning, match="after 2 batches of the data. They had 8 examples .* first one has 16 now"):
        fit("single_device", tmp_path, 16, steps_per_epoch=4)


# What `fit` says where it resumes: one line, and a warning for each argument that the checkpoint overrides


def resumable(
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


@pytest.mark.few(1)
@pytest.mark.parametrize("verbose", [1, 2])
def test_fit_says_where_it_resumes_and_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verbose: int
) -> None:
    resumable(tmp_path, epochs=3, interrupt_at=small.STEPS_PER_EPOCH + 2, verbose=verbose)
    assert said(capsys, tmp_path) == [], "a new run does not resume"
    resumable(tmp_path, epochs=2, verbose=verbose)
    resuming = "Resuming after epoch 1 and 2 steps of the next, of 2 epochs, from the checkpoint in FOLDER."
    assert said(capsys, tmp_path) == [resuming]
    resumable(tmp_path, epochs=2, verbose=verbose)
    assert said(capsys, tmp_path) == ["Nothing is left to train: the checkpoint in FOLDER is after epoch 2 of 2."]
    resumable(tmp_path, epochs=3, verbose=verbose)
    assert said(capsys, tmp_path) == ["Resuming after epoch 2, of 3 epochs, from the checkpoint in FOLDER."]


def test_fit_says_that_a_callback_has_ended_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    for verbose in (0, 2):
        resumable(tmp_path, epochs=9, callbacks=[stop], verbose=verbose)
    ended = "Nothing is left to train: a callback has ended the training in FOLDER after epoch 2."
    assert said(capsys, tmp_path) == [ended]


def test_a_learning_rate_that_is_ignored_is_a_warning(tmp_path: Path) -> None:
    resumable(tmp_path, epochs=2)
    message = r"The learning rate 0.3 is ignored: the run resumes with 0.05, that of its checkpoint. Train in a new fo"
    for epochs in (2, 3):  # the second checkpoint is of a program with the other rate
        with pytest.warns(UserWarning, match=message.replace("0.05", "0.0[0-9]+")):
            resumable(tmp_path, rate=0.3, epochs=epochs)


def test_a_seed_that_is_ignored_is_a_warning(tmp_path: Path) -> None:
    resumable(tmp_path, epochs=1)
    with pytest.warns(UserWarning, match="seed=1 is ignored except for the order of shuffled arrays: .* of seed=0. Tr"):
        resumable(tmp_path, seed=1, epochs=2)


def test_the_same_program_resumes_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = resumable(tmp_path, epochs=2)
        trainer.fit(small.data(), epochs=3, verbose=0, checkpoints=tfpar.Checkpoints(tmp_path))
        resumable(tmp_path, epochs=4)
