"""Signals and damaged files: the same command resumes, and ends with the weights of an undisturbed run."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import metrics, settings
from tfpar.runs.directory import RunDirectory

SMALL = [
    *("--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"),
    *settings("data.num_examples=4096", "training.epochs=2", "optimizer.name=adam", "training.checkpoint_seconds=0"),
]


@pytest.fixture(scope="module")
def finished(logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, trained to its end."""
    return command.trained(SMALL, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def crashed(finished: Path, tmp_path: Path) -> RunDirectory:
    """A run that was killed after the last checkpoint but one, and next to it, in `whole/`, the same run finished."""
    for name in ("run", "whole"):
        shutil.copytree(finished, tmp_path / name)
    directory = RunDirectory(tmp_path / "run")
    directory.results.unlink()
    directory.model.unlink()
    sorted(directory.checkpoints.iterdir())[-1].unlink()
    return directory


def test_a_run_resumes_in_the_process_that_began_it(
    crashed: RunDirectory, call: command.InProcess, tmp_path: Path
) -> None:
    resumed = call(*SMALL)
    assert resumed.code == 0, resumed
    assert "Resuming after epoch 1" in resumed.out
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_truncated_checkpoint_is_passed_over(crashed: RunDirectory, call: command.InProcess, tmp_path: Path) -> None:
    newest = sorted(crashed.checkpoints.iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-200])
    resumed = call(*SMALL)
    assert resumed.code == 0, resumed
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_when_all_checkpoints_are_damaged_the_run_does_not_start_over(
    crashed: RunDirectory, call: command.InProcess
) -> None:
    for path in crashed.checkpoints.iterdir():
        path.write_bytes(b"")
    before = command.contents(crashed.path, without=[".lock", "tensorflow.log"])
    refused = call(*SMALL)
    assert refused.code == 1
    assert "Every checkpoint in run/checkpoints is damaged" in refused.err
    assert "delete the folder" in refused.err
    assert command.contents(crashed.path, without=[".lock", "tensorflow.log"]) == before


def test_a_metrics_file_cut_by_a_crash_is_mended(crashed: RunDirectory, call: command.InProcess) -> None:
    expected = metrics(crashed.path)
    lines = crashed.metrics.read_text().splitlines()
    crashed.metrics.write_text(lines[0] + "\n" + lines[1][:20])
    assert call(*SMALL).code == 0
    mended = crashed.metrics.read_text()
    assert mended.count("\n") == 2, f"each line is an epoch's: {mended}"
    assert metrics(crashed.path) == expected


def test_a_crash_between_the_last_checkpoint_and_the_model_costs_nothing(
    crashed: RunDirectory, call: command.InProcess, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "whole" / "checkpoints", crashed.checkpoints, dirs_exist_ok=True)
    resumed = call(*SMALL)
    assert resumed.code == 0, resumed
    assert "Epoch" not in resumed.out, "no step is left to do"
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")


SIGNALLED = """
import os, signal, pathlib, time, keras
from tfpar.trainers.regression import Regression

class Send(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            for place, number in enumerate(pathlib.Path("signals").read_text().split()):
                time.sleep(0.6 if place else 0)  # one that follows at once is the same request
                os.kill(os.getpid(), int(number))

class Signalled(Regression):
    def fit(self, *arguments, callbacks, **more):
        return super().fit(*arguments, callbacks=[*callbacks, Send()], **more)
"""


@pytest.fixture
def signalled(call: command.InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Flags of a run to which the numbers in the file `signals` are sent after its second step, and its folder."""
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    (tmp_path / "signals").touch()
    monkeypatch.delitem(sys.modules, "signalled", raising=False)
    return [*SMALL, *settings("trainer=signalled.Signalled", "training.checkpoint_seconds=60")]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_one_checkpoint_from_which_the_run_resumes(
    signalled: list[str], call: command.InProcess, tmp_path: Path, number: signal.Signals
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert call(*signalled, "--directory", "whole").code == 0
    (tmp_path / "signals").write_text(str(int(number)))
    stopped = call(*signalled)
    assert stopped.code == 130, stopped
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.npz"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers, "Python's own again"
    (tmp_path / "signals").write_text("")
    assert call(*signalled).code == 0
    command.assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once(signalled: list[str], call: command.InProcess, tmp_path: Path) -> None:
    (tmp_path / "signals").write_text("2 2")
    stopped = call(*signalled)
    assert (stopped.code, stopped.err.splitlines()[-1]) == (130, "Interrupted."), stopped
    assert not list((tmp_path / "run").rglob("*.npz")), "it did not wait for a checkpoint"


def test_a_second_sigterm_is_the_same_request(signalled: list[str], call: command.InProcess, tmp_path: Path) -> None:
    """Batch systems send it to every process of a job, and what started the process passes it on as well."""
    (tmp_path / "signals").write_text("15 15")
    assert call(*signalled).code == 130
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.npz"]
