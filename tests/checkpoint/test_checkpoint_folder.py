"""Other files in a folder of checkpoints: large numbers, links, pipes, files of other runs, forged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import small
from tfpar.checkpoint import Checkpoints, Position, file_format


@pytest.fixture(scope="module")
def model(logical_cpus: list[str]) -> keras.Model:
    return small.initial_model()


def save(model: keras.Model, directory: Path, step: int, run: str | None = None, keep: int = 9) -> Path:
    model.optimizer.iterations.assign(step)
    path = Checkpoints(directory, keep=keep, asynchronous=False, run=run).save(model, Position(epoch=step), {})
    assert path is not None
    return path


def restored_epoch(model: keras.Model, directory: Path, run: str | None = None) -> int:
    restored = Checkpoints(directory, run=run).restore(model)
    assert restored is not None
    return restored[0].epoch


# --- order ------------------------------------------------------------------------------------------------------------


def test_the_newest_is_the_one_of_the_highest_step_also_beyond_eight_digits(model: keras.Model, tmp_path: Path) -> None:
    """By name, step-100000000 comes before step-99999999."""
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(model, tmp_path, step)
    assert restored_epoch(model, tmp_path) == 100_000_000
    save(model, tmp_path, 100_000_001, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000.npz", "step-100000001.npz"]


def test_only_files_with_the_name_of_a_checkpoint_count(model: keras.Model, tmp_path: Path) -> None:
    path = save(model, tmp_path, 1)
    others = ["step-9.npz.bak", "step-.npz", "step-1e9.npz", "step-\u0663.npz", "step-best.npz"]
    for name in others:
        path.with_name(name).write_bytes(b"somebody's")
    assert restored_epoch(model, tmp_path) == 1
    save(model, tmp_path, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "step-00000002.npz"])


# --- links, pipes, folders --------------------------------------------------------------------------------------------


def test_a_link_to_a_checkpoint_is_read_and_never_written_through(model: keras.Model, tmp_path: Path) -> None:
    elsewhere = save(model, tmp_path / "elsewhere", 2)
    content = elsewhere.read_bytes()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "step-00000002.npz").symlink_to(elsewhere)
    assert restored_epoch(model, tmp_path / "here") == 2
    written = save(model, tmp_path / "here", 2)
    assert not written.is_symlink()
    assert elsewhere.read_bytes() == content


def test_a_link_planted_under_the_name_of_an_unfinished_file_is_not_followed(
    model: keras.Model, tmp_path: Path
) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000001.npz.0123abcd.unfinished").symlink_to(treasure)
    save(model, tmp_path / "checkpoints", 1)
    assert treasure.read_text() == "gold"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.npz"]


# --- another run's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["mine", None], ids=["a run that knows its identity", "a folder's own"])
def test_a_checkpoint_of_another_run_of_the_same_model_is_refused_and_stays(
    model: keras.Model, tmp_path: Path, run: str | None
) -> None:
    save(model, tmp_path / "a", 1, run=run)
    foreign = save(model, tmp_path / "b", 7)
    copy = tmp_path / "a" / foreign.name
    copy.write_bytes(foreign.read_bytes())
    with pytest.raises(ValueError, match=r"step-0000000[17]\.npz is a checkpoint of another run\. Move it away"):
        Checkpoints(tmp_path / "a", run=run).restore(model)
    assert copy.exists()


def test_an_older_checkpoint_of_another_run_is_not_removed_as_the_oldest(model: keras.Model, tmp_path: Path) -> None:
    foreign = save(model, tmp_path, 1, run="other")
    save(model, tmp_path, 5, run="mine")
    with pytest.raises(ValueError, match=r"step-00000001\.npz is a checkpoint of another run"):
        Checkpoints(tmp_path, keep=1, run="mine").restore(model)
    assert foreign.exists()


def test_all_files_of_a_folder_carry_one_identity(model: keras.Model, tmp_path: Path) -> None:
    paths = [save(model, tmp_path, step) for step in (1, 2)]
    first, second = (file_format.read_run(path) for path in paths)
    assert first == second
    assert first
    assert file_format.read_run(save(model, tmp_path / "other", 1)) not in (first, "", None)


# --- forged -----------------------------------------------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint again with another JSON."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    state = json.loads(str(arrays["state.json"]))
    change(state)
    np.savez(path, allow_pickle=False, **{**arrays, "state.json": np.array(json.dumps(state))})


def test_a_state_that_would_replace_a_method_of_a_callback_is_refused(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(small.build_model)
    trainer.fit(small.data(), verbose=0, checkpoints=Checkpoints(tmp_path))
    (path,) = tmp_path.iterdir()
    forge(path, lambda state: state["callbacks"]["History.0"].update({"on_epoch_end": 3}))
    with pytest.raises(ValueError, match=r"state of History\.0 sets 'on_epoch_end', which is not state of a callback"):
        trainer.fit(small.data(), epochs=2, verbose=0, checkpoints=Checkpoints(tmp_path))


def test_a_callback_may_remember_a_table_that_names_an_array(tmp_path: Path) -> None:
    """It has the form of a reference to a stored array."""

    class Remembers(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.table = {"array": epoch}

    callbacks = [Remembers() for _ in range(2)]
    for epochs, callback in enumerate(callbacks, start=1):
        trainer = tfpar.Trainer(small.build_model)
        trainer.fit(
            small.data(), epochs=1, verbose=0, callbacks=[callback], checkpoints=Checkpoints(tmp_path)
        )  # fmt: skip
        assert callback.table == {"array": 0}, f"after {epochs} starts"
