"""Lost or damaged files of a finished or resumed run are written again from its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import contents, metrics, settings
from tfpar.runs.directory import RunDirectory

FLAGS = [
    *("--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"),
    *settings("data.num_examples=2048", "training.epochs=3", "training.checkpoint_seconds=0"),
    *settings("callbacks.tensorboard=false"),
]


@pytest.fixture(scope="module")
def whole(logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, trained to its end."""
    return command.trained(FLAGS, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> RunDirectory:
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def call(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole: Path
) -> command.InProcess:
    return command.InProcess(capfd, monkeypatch, tmp_path)


def damage_line(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{broken\n" + lines[2])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.keras", Path.unlink),
        ("model.keras", flip),
        ("metrics.jsonl", Path.unlink),
        ("metrics.jsonl", damage_line),
        ("results.json", lambda path: path.write_text("")),
        ("results.json", cut),
    ],
    ids=["no model", "changed model", "no metrics", "a damaged line", "empty results", "cut results"],
)
def test_a_finished_run_writes_lost_or_damaged_files_again(
    call: command.InProcess, directory: RunDirectory, whole: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(directory.path / name)
    repaired = call(*FLAGS)
    assert repaired.code == 0, repaired
    said = " ".join(repaired.out.split())
    assert f"This run was trained to its end, but {name} is missing or changed: written again." in said
    assert "1/3" not in repaired.out, "no epoch is trained again"
    assert "Traceback" not in repaired.err
    command.assert_same_weights(directory.path, whole)
    assert directory.metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes(), "with the speed of each epoch"
    assert "trained to its end already" in call(*FLAGS).out


def test_a_finished_run_that_is_whole_changes_nothing(call: command.InProcess, directory: RunDirectory) -> None:
    before = contents(directory.path, without=[".lock"])
    assert "trained to its end already" in call(*FLAGS).out
    assert contents(directory.path, without=[".lock"]) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["{broken", "[1]", '{"epoch": "2"}', '{"epoch": -1}', "9" * 5000, "[" * 99_999])
def test_a_damaged_line_of_the_metrics_costs_no_other_line(
    call: command.InProcess, directory: RunDirectory, whole: Path, line: str
) -> None:
    """In a run that resumes in its last epoch."""
    directory.results.unlink()
    sorted(directory.checkpoints.iterdir())[-1].unlink()
    directory.metrics.write_text(f"{line}\n{line}\n")
    resumed = call(*FLAGS)
    assert resumed.code == 0, resumed
    assert resumed.err == ""
    assert metrics(directory.path) == metrics(whole)


def test_optimizer_json_is_written_again(call: command.InProcess, directory: RunDirectory, whole: Path) -> None:
    directory.results.unlink()
    directory.optimizer.write_text("{")
    longer = call(*FLAGS, *settings("training.epochs=4"))
    assert longer.code == 1
    assert "optimizer.json is missing or damaged" in longer.err
    assert "repeat the command with 3 first" in longer.err
    assert call(*FLAGS).code == 0
    assert directory.optimizer.read_bytes() == (whole / "optimizer.json").read_bytes()
    assert call(*FLAGS, *settings("training.epochs=4")).code == 0


@pytest.mark.extended
def test_a_checkpoint_of_another_run_of_the_same_model_is_refused(
    call: command.InProcess, directory: RunDirectory, tmp_path: Path
) -> None:
    other = [*FLAGS, "--directory", "other", *settings("optimizer.learning_rate=0.01")]
    assert call(*other).code == 0
    directory.results.unlink()
    shutil.rmtree(directory.checkpoints)
    shutil.copytree(tmp_path / "other" / "checkpoints", directory.checkpoints)
    refused = call(*FLAGS)
    assert refused.code == 1
    assert "is a checkpoint of another run. Move it away" in refused.err
    assert refused.err.count("\n") == 1
