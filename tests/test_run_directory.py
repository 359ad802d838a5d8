"""The folder of one run: whom it takes, whom it refuses, and that a refusal changes nothing in it."""

import doctest
import errno
from pathlib import Path

import pytest

from tests.command import contents, file_size_limit
from tfpar import config, run_directory
from tfpar.run_directory import RunDirectory

RUN = config.Run()
OTHER = config.load(None, ["training.epochs=3", "optimizer.settings.beta_1=0.8"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the default run and some of its work."""
    folder = tmp_path / "runs" / "x"
    directory = RunDirectory(folder)
    directory.claim(RUN)
    directory.checkpoints.mkdir()
    (directory.checkpoints / "step-00000001.npz").write_bytes(b"weights")
    directory.metrics.write_text('{"epoch": 1}\n')
    return folder


def refusal(path: Path, run: config.Run) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller asserts the message
        RunDirectory(path).claim(run)
    return str(raised.value)


def test_a_new_folder_is_made_with_all_its_parents_and_holds_the_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "er" / "x")
    directory.claim(OTHER)
    assert config.load(directory.config) == OTHER


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    RunDirectory(tmp_path).claim(RUN)
    assert config.load(tmp_path / "config.toml") == RUN


def test_the_same_run_resumes_in_its_folder(folder: Path) -> None:
    before = contents(folder, without=[".lock"])
    RunDirectory(folder).claim(config.load(folder / "config.toml"))
    assert contents(folder, without=[".lock"]) == before


def test_another_run_is_refused_with_the_keys_that_differ_and_ways_out(folder: Path) -> None:
    before = contents(folder)
    message = refusal(folder, OTHER)
    assert contents(folder) == before, "a refusal changes nothing"
    assert f"{folder} holds another configuration's run" in message
    assert "optimizer.settings.beta_1 is not set there and 0.8 now" in message
    assert "{}" not in message, "a table that is empty is no key that differs"
    assert "epochs" not in message, "more epochs are no reason to refuse"
    for way_out in ("Choose another --directory", f"--config {folder}/config.toml", "delete the folder"):
        assert way_out in message


def test_settings_that_change_no_weight_are_marked_in_their_sections() -> None:
    keys = [
        f"{section}.{key}" for section, table in RUN.model_dump().items() if isinstance(table, dict) for key in table
    ]
    assert {key for key in ["trainer", "seed", *keys] if not config.changes_weights(key)} == {
        *("training.epochs", "training.steps_per_call", "training.checkpoint_seconds", "training.keep_checkpoints"),
        "training.nonfinite_loss",
        *("strategy.form_seconds", "strategy.silence_seconds"),
        *("callbacks.tensorboard", "callbacks.check_replicas_every_steps"),
    }


def test_a_run_may_resume_with_other_settings_that_change_no_weight(folder: Path) -> None:
    before = contents(folder, without=[".lock"])
    overrides = ["training.epochs=20", "training.keep_checkpoints=9", "callbacks.tensorboard=false"]
    directory = RunDirectory(folder)
    directory.claim(config.load(None, overrides))
    assert directory.resumed == RUN
    assert contents(folder, without=[".lock"]) == before, "it is recorded when it trains"


def test_a_run_is_finished_when_its_results_are_those_of_as_many_epochs(folder: Path) -> None:
    first = RunDirectory(folder)
    first.claim(RUN)
    assert first.finished(RUN) is None
    first.finish({"epochs": 10, "loss": 0.5})
    assert first.finished(RUN) == {"epochs": 10, "loss": 0.5}
    assert first.finished(config.load(None, ["training.epochs=20"])) is None
    assert first.finished(config.load(None, ["callbacks.tensorboard=false"])) == {"epochs": 10, "loss": 0.5}
    first.reopen()
    assert first.finished(RUN) is None


def test_numbers_that_are_equal_make_the_same_run(folder: Path) -> None:
    RunDirectory(folder).claim(config.load(None, ["training.checkpoint_seconds=60", "seed=0"]))


def test_files_that_are_no_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    message = refusal(tmp_path, RUN)
    assert "must be empty or hold a run" in message
    assert "Choose another --directory" in message
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"], "nothing is added"


@pytest.mark.parametrize("text", ["[training\n", "[training]\nepoch = 3\n"], ids=["no TOML", "unknown key"])
def test_a_configuration_that_cannot_be_read_is_refused_and_stays(folder: Path, text: str) -> None:
    (folder / "config.toml").write_text(text)
    before = contents(folder)
    message = refusal(folder, RUN)
    assert f"{folder / 'config.toml'} cannot be read: " in message
    assert contents(folder) == before


def test_only_one_process_trains_in_a_folder(folder: Path) -> None:
    first = RunDirectory(folder)
    first.claim(RUN)
    before = contents(folder, without=[".lock"])
    assert "Only one process can train in" in refusal(folder, RUN)
    assert contents(folder, without=[".lock"]) == before
    del first
    RunDirectory(folder).claim(RUN)


def test_a_folder_below_a_file_and_a_file_itself_cannot_be_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    for path in (file, file / "x"):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is asserted
            RunDirectory(path).claim(RUN)
        assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert file.read_text() == "text"


def test_after_a_full_disk_the_same_run_can_claim_the_folder(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(OSError, match="too large") as raised:
        RunDirectory(tmp_path / "x").claim(RUN)
    assert raised.value.errno == errno.EFBIG
    RunDirectory(tmp_path / "x").claim(RUN)
    assert config.load(tmp_path / "x" / "config.toml") == RUN


def test_after_a_crash_within_the_claim_the_same_run_can_claim_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "config.unfinished").write_text("trainer =")
    RunDirectory(tmp_path).claim(RUN)
    assert config.load(tmp_path / "config.toml") == RUN


def test_a_folder_in_which_nothing_was_trained_can_be_claimed_by_another_run(tmp_path: Path) -> None:
    """So a mistyped setting, refused after the claim, does not block its own correction."""
    RunDirectory(tmp_path / "x").claim(OTHER)
    (tmp_path / "x" / "tensorflow.log").write_text("no GPU")
    RunDirectory(tmp_path / "x").claim(RUN)
    assert config.load(tmp_path / "x" / "config.toml") == RUN


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(run_directory).failed == 0
