"""A run's folder that is removed, emptied, renamed or replaced while the run trains in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import metrics, settings
from tfpar import config

FLAGS = [
    *("--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "runs/x"),
    *settings("data.num_examples=2048", "training.global_batch_size=128", "training.epochs=3"),
    *settings("training.steps_per_call=4", "trainer=own.Disturbed"),
]
OWN = """
import keras
from tfpar.trainers.regression import Regression

class Disturbs(keras.callbacks.Callback):
    single_batches = False
    forgets = True

    def __init__(self, moment, act):
        super().__init__()
        self.moment, self.act = moment, act

    def on_train_batch_end(self, batch, logs=None):
        self.strike("step", int(self.model.optimizer.iterations.numpy()))

    def on_epoch_end(self, epoch, logs=None):
        self.strike("epoch", epoch + 1)

    def on_train_end(self, logs=None):
        self.strike("end", 0)

    def strike(self, name, number):
        if self.moment[0] == name and number >= self.moment[1]:
            self.moment = ("never", 0)
            self.act()

class Disturbed(Regression):
    moment, act = ("never", 0), None

    def fit(self, *arguments, callbacks, **more):
        return super().fit(*arguments, callbacks=[*callbacks, Disturbs(self.moment, type(self).act)], **more)
"""
STEP, LAST_EPOCH, END = ("step", 8), ("epoch", 3), ("end", 0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directory of the uninterrupted run."""
    return {}


def undisturbed(call: command.InProcess, tmp_path: Path, expected: dict[str, Path]) -> Path:
    if not expected:
        assert call(*FLAGS, "--directory", "whole").code == 0
        expected["run"] = tmp_path / "whole"
    return expected["run"]


def disturb(moment: tuple[str, int], act: object) -> None:
    import own

    own.Disturbed.moment, own.Disturbed.act = moment, staticmethod(act)


def rename() -> None:
    Path("runs/x").rename("runs/kept")


def remove() -> None:
    shutil.rmtree("runs/x")


def empty() -> None:
    for path in Path("runs/x").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace() -> None:
    rename()
    shutil.copytree("runs/kept", "runs/x")
    Path("runs/x/run.json").write_text('{"run": "another"}')


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("moment", "act", "kept_in"),
    [
        (STEP, rename, "runs/kept"),
        (STEP, remove, "runs/x.rescued"),
        (STEP, empty, "runs/x.rescued"),
        (STEP, replace, "runs/kept"),
        (LAST_EPOCH, remove, "runs/x.rescued"),
        (END, rename, "runs/kept"),
        (END, remove, "runs/x.rescued"),
    ],
    ids=[
        "renamed",
        "removed",
        "emptied",
        "replaced",
        "removed in the last epoch",
        "renamed at the end",
        "removed there",
    ],
)
def test_the_run_ends_with_an_error_and_resumes_where_it_says(
    call: command.InProcess,
    tmp_path: Path,
    expected: dict[str, Path],
    moment: tuple[str, int],
    act: object,
    kept_in: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    whole = undisturbed(call, tmp_path, expected)
    disturb(moment, act)
    stopped = call(*FLAGS)
    assert stopped.code == 1, stopped
    assert stopped.err.startswith("error: runs/x was removed or renamed while this run trained in it")
    assert stopped.err.count("\n") == 1, stopped.err
    assert stopped.err.rstrip().endswith(f"{kept_in}.")
    assert act is replace or not (tmp_path / "runs" / "x" / "model.keras").exists()
    assert (tmp_path / kept_in / "config.toml").exists()
    disturb(("never", 0), None)
    resumed = call(*FLAGS, "--directory", str(tmp_path / kept_in))
    assert resumed.code == 0, resumed
    command.assert_same_weights(tmp_path / kept_in, whole)
    assert metrics(tmp_path / kept_in) == metrics(whole)


def test_a_single_lost_file_is_written_again(
    call: command.InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        for name in ("run.json", "metrics.jsonl"):
            (tmp_path / "runs" / "x" / name).unlink(missing_ok=True)

    monkeypatch.syspath_prepend(tmp_path)
    disturb(("epoch", 2), lose)
    assert call(*FLAGS).code == 0
    assert len(metrics(tmp_path / "runs" / "x")) == 3
    assert (tmp_path / "runs" / "x" / "run.json").exists()
    config.load(tmp_path / "runs" / "x" / "config.toml")
    assert "trained to its end already" in call(*FLAGS).out
