"""Ctrl-C, a terminated job, a killed process, a damaged file: the same command resumes and ends with equal weights."""

import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import command
from tests.support.command import Outcome, metrics, settings
from tfpar.checkpoint import Checkpoints, Position
from tfpar.runs.directory import RunDirectory

# Everything with a state: Adam's moments, Dropout's and the augmentation's random numbers, the shuffle.
FLAGS = [
    *("--directory", "runs/x"),
    *settings("model.dropout=0.25", 'data.augmentation=["shift"]', "training.checkpoint_seconds=0"),
    *settings("training.epochs=4", "training.global_batch_size=6"),
]
STEPS_PER_EPOCH = 250


class Chain(NamedTuple):
    """A run that was interrupted, resumed, killed and resumed, and an uninterrupted run."""

    interrupted: Outcome
    interrupted_at: Position
    killed: Outcome
    damaged: Path  # the newest checkpoint, cut short after the kill
    resumed_at: Position
    last: Outcome
    second: Outcome  # of the same command while it ran already
    directory: Path
    undisturbed: Path


def position(directory: RunDirectory) -> Position:
    """Return the position of the newest readable checkpoint."""
    found = Checkpoints(directory.checkpoints).position()
    assert found is not None
    return found


def is_within_epoch(directory: RunDirectory, epoch: int) -> bool:
    """Whether a run has reported the epochs before this one (from 1) and written checkpoints in it."""
    if len(metrics(directory.path)) < epoch - 1:
        return False
    steps = sorted(int(path.stem.removeprefix("step-")) for path in directory.checkpoints.glob("step-*.npz"))
    return len(steps) > 1 and steps[-2] > (epoch - 1) * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    data = tmp_path_factory.getbasetemp() / "tfds"
    folder, undisturbed = tmp_path_factory.mktemp("disturbed"), tmp_path_factory.mktemp("undisturbed")
    directory, whole = RunDirectory(folder / "runs" / "x"), RunDirectory(undisturbed / "runs" / "x")

    with command.started(FLAGS, folder, data) as running:
        running.wait_until(lambda: is_within_epoch(directory, 2))
        running.send(signal.SIGINT)
        interrupted = running.finish()
    interrupted_at = position(directory)

    with command.started(FLAGS, folder, data) as running:
        running.wait_until(lambda: is_within_epoch(directory, 3))
        running.send(signal.SIGKILL)
        killed = running.finish()
    damaged = sorted(directory.checkpoints.glob("step-*.npz"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    resumed_at = position(directory)
    last = command.run(FLAGS, folder, data)

    with command.started(FLAGS, undisturbed, data) as running:
        running.wait_until(lambda: is_within_epoch(whole, 1))
        second = command.run(FLAGS, undisturbed, data)
        assert running.finish().code == 0
    return Chain(
        interrupted, interrupted_at, killed, damaged, resumed_at, last, second, directory.path, whole.path
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.slow_start
def test_ctrl_c_ends_the_run_after_its_step_and_says_how_to_resume(chain: Chain) -> None:
    code, out, err = chain.interrupted
    assert code == 130, chain.interrupted
    assert chain.interrupted_at.epoch == 1
    assert 0 < chain.interrupted_at.step < STEPS_PER_EPOCH, "the signal came within an epoch"
    assert f"Stopped after step {STEPS_PER_EPOCH + chain.interrupted_at.step}" in out, "what is said is what is saved"
    assert "Resume with the same command:\n  python -m tfpar.train --directory runs/x --set" in out
    assert "Stopping after this step" in err
    assert "Traceback" not in err


@pytest.mark.extended
@pytest.mark.slow_start
def test_the_same_command_says_where_it_resumes(chain: Chain) -> None:
    for stood, outcome in ((chain.interrupted_at, chain.killed), (chain.resumed_at, chain.last)):
        assert f"Resuming after epoch {stood.epoch}" in outcome.out
        if stood.step:
            assert f"Resuming after epoch {stood.epoch} and {stood.step} steps" in outcome.out


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_on_the_terminal(chain: Chain) -> None:
    assert chain.killed.code == -signal.SIGKILL, chain.killed
    assert chain.resumed_at.epoch == 2, "the checkpoint before the newest is of the same epoch"
    assert chain.damaged.name in chain.last.err, chain.last.err
    assert chain.last.err.count("\n") == 1, f"once, and nothing of TensorFlow's: {chain.last.err}"


@pytest.mark.extended
@pytest.mark.slow_start
def test_the_weights_are_those_of_an_undisturbed_run(chain: Chain) -> None:
    assert chain.last.code == 0, chain.last
    command.assert_same_weights(chain.directory, chain.undisturbed)


@pytest.mark.extended
@pytest.mark.slow_start
def test_the_metrics_are_those_of_an_undisturbed_run(chain: Chain) -> None:
    assert [line["epoch"] for line in metrics(chain.directory)] == [1, 2, 3, 4]
    assert metrics(chain.directory) == metrics(chain.undisturbed)


@pytest.mark.extended
@pytest.mark.slow_start
def test_nothing_half_written_stays_in_the_directory(chain: Chain) -> None:
    assert not [path for path in chain.directory.rglob("*") if "unfinished" in path.name]
    assert len(list((chain.directory / "checkpoints").iterdir())) == 3, "as many as training.keep_checkpoints"


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_second_process_in_the_directory_is_refused(chain: Chain) -> None:
    assert chain.second.code == 1, chain.second
    assert chain.second.err.startswith("error: Only one process can train in runs/x")
    assert chain.second.err.count("\n") == 1


# Damage, inside one process

SMALL = [
    *("--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"),
    *settings("data.num_examples=4096", "training.epochs=2", "optimizer.name=adam", "training.checkpoint_seconds=0"),
]


@pytest.fixture
def crashed(call: command.InProcess, tmp_path: Path) -> RunDirectory:
    """A run that was killed after the last checkpoint but one, and next to it, in `whole/`, the same run finished."""
    assert call(*SMALL).code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
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
