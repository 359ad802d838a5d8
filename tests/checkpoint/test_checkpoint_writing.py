"""A step never waits for the disk, no error of the writer is lost, and checkpoints reach workers that have no disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import command, small
from tfpar.checkpoint import Checkpoints, Position, file_format


@pytest.fixture(scope="module")
def model(logical_cpus: list[str]) -> keras.Model:
    return small.initial_model()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not set(threading.enumerate()) - before


class SlowDisk:
    """Holds every write up until it is released."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._released = threading.Event()

    def write(self, *arguments: Any) -> None:
        assert self._released.wait(timeout=30)
        self._write(*arguments)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk(file_format.write)
    monkeypatch.setattr(file_format, "write", disk.write)
    return disk


def save(checkpoints: Checkpoints, model: keras.Model, step: int) -> Path:
    model.optimizer.iterations.assign(step)
    path = checkpoints.save(model, Position(epoch=step), {})
    assert path is not None
    return path


def restored_epoch(directory: Path, model: keras.Model) -> int:
    restored = Checkpoints(directory).restore(model)
    assert restored is not None
    return restored[0].epoch


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- asynchronous -----------------------------------------------------------------------------------------------------


def test_save_does_not_wait_for_the_disk(model: keras.Model, tmp_path: Path, slow_disk: SlowDisk) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, model, 1)
    assert not path.exists(), "the disk still holds it up"
    slow_disk.release()
    checkpoints.wait()
    assert path.exists()


def test_no_checkpoint_is_due_while_one_is_written(model: keras.Model, tmp_path: Path, slow_disk: SlowDisk) -> None:
    checkpoints = Checkpoints(tmp_path, every_seconds=1e-9)
    assert checkpoints.due()
    save(checkpoints, model, 1)
    assert not checkpoints.due()
    slow_disk.release()
    checkpoints.wait()
    assert checkpoints.due()


def test_every_call_is_followed_by_one_when_none_may_be_left_out(
    model: keras.Model, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    """With every_seconds=0 the training goes at the disk's speed."""
    checkpoints = Checkpoints(tmp_path, every_seconds=0)
    path = save(checkpoints, model, 1)
    timer = threading.Timer(0.1, slow_disk.release)
    timer.start()
    assert checkpoints.due()
    assert path.exists(), "it was waited for"
    timer.join()


def test_the_state_at_the_time_of_save_is_written(model: keras.Model, tmp_path: Path, slow_disk: SlowDisk) -> None:
    """Training changes the weights meanwhile, and a callback may change its array in place."""
    checkpoints, counts = Checkpoints(tmp_path), np.arange(3)
    expected = model.get_weights()
    checkpoints.save(model, Position(epoch=1), {"Counts.0": {"counts": counts}})
    model.set_weights([weight + 1 for weight in expected])
    counts += 10
    slow_disk.release()
    restored = checkpoints.restore(model)
    assert restored is not None
    small.assert_same_state(model.get_weights(), expected)
    np.testing.assert_array_equal(restored[1]["Counts.0"]["counts"], [0, 1, 2])


def test_after_fit_the_last_checkpoint_is_written(tmp_path: Path, slow_disk: SlowDisk) -> None:
    timer = threading.Timer(0.5, slow_disk.release)
    timer.start()
    trainer = tfpar.Trainer(small.build_model)
    trainer.fit(small.data(), verbose=0, checkpoints=Checkpoints(tmp_path))
    assert names(tmp_path) == [f"step-{small.STEPS_PER_EPOCH:08d}.npz"]
    timer.join()


def test_a_fit_that_ends_in_an_error_has_written_its_checkpoint(tmp_path: Path, slow_disk: SlowDisk) -> None:
    def fail(epoch: int, logs: Any) -> None:
        slow_disk.release()
        raise KeyboardInterrupt

    trainer = tfpar.Trainer(small.build_model)
    stop = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and fail(epoch, logs))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[stop], checkpoints=Checkpoints(tmp_path, 1e-9))
    assert len(names(tmp_path)) == 1
    assert names(tmp_path)[0].endswith(".npz")


# --- errors of the writer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda checkpoints, model: checkpoints.wait(),
        lambda checkpoints, model: checkpoints.save(model, Position(), {}),
        lambda checkpoints, model: _due_after_the_write(checkpoints),
    ],
    ids=["wait", "save", "due"],
)
def test_a_full_disk_is_raised_by_the_next_call_once(
    model: keras.Model, tmp_path: Path, call: Callable[[Checkpoints, keras.Model], Any]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, model, 1)
    checkpoints.wait()
    with command.file_size_limit(600):
        path = save(checkpoints, model, 2)
        with pytest.raises(OSError, match="File too large") as caught:
            call(checkpoints, model)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert names(tmp_path) == ["step-00000001.npz"], "no half-written file is left, and the one before stays"
    checkpoints.wait()
    save(checkpoints, model, 3)
    assert checkpoints.due() is False
    checkpoints.wait()
    assert restored_epoch(tmp_path, model) == 3, "with free space, it writes again"


def _due_after_the_write(checkpoints: Checkpoints) -> bool:
    for thread in threading.enumerate():
        if thread.name == "tfpar checkpoint":
            thread.join()
    return checkpoints.due()


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Take the right to write away, from the superuser too: tests in containers often run as root."""
    user = os.geteuid()
    directory.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o755)


def test_a_folder_that_became_read_only_is_an_os_error_that_names_it(model: keras.Model, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, model, 1)
    checkpoints.wait()
    with read_only(tmp_path):
        save(checkpoints, model, 2)
        with pytest.raises(PermissionError, match=str(tmp_path)):
            checkpoints.wait()
        with pytest.raises(PermissionError, match=str(tmp_path)):
            checkpoints.restore(model)
    assert names(tmp_path) == ["step-00000001.npz"]


def test_an_error_that_ends_the_training_is_not_hidden_by_the_writers(
    model: keras.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def train() -> None:
        with checkpoints:
            save(checkpoints, model, 1)
            raise FloatingPointError("the loss")

    with command.file_size_limit(600), pytest.raises(FloatingPointError, match="the loss"):
        train()
    path = tmp_path / "step-00000001.npz"
    expected = f"warning: the last checkpoint is not written: [Errno 27] File too large: '{path}'.\n"
    assert capsys.readouterr().err == expected


# --- several workers --------------------------------------------------------------------------------------------------


def test_a_worker_loads_the_chiefs_checkpoint(model: keras.Model, tmp_path: Path) -> None:
    chief, worker = Checkpoints(tmp_path / "chief"), Checkpoints(tmp_path / "worker")
    assert chief.read() is None
    expected = model.get_weights()
    chief.save(model, Position(epoch=2, batches=5), {"Counts.0": {"counts": np.arange(3), "name": "a"}})
    blob = chief.read()
    assert blob is not None
    other = small.build_model()
    other.optimizer.build(other.trainable_variables)
    position, callbacks = worker.load(other, blob)
    assert position == Position(epoch=2, batches=5)
    assert callbacks["Counts.0"]["name"] == "a"
    np.testing.assert_array_equal(callbacks["Counts.0"]["counts"], [0, 1, 2])
    small.assert_same_state(other.get_weights(), expected)
    assert not (tmp_path / "worker").exists()


def test_bytes_that_were_changed_on_their_way_are_refused(model: keras.Model, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, model, 1)
    blob = checkpoints.read()
    assert blob is not None
    with pytest.raises(file_format.DamagedError):
        checkpoints.load(model, blob[:-100])
