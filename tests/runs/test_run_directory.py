"""The run directory: accepted and refused folders, and a refusal that changes nothing."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import contents, file_size_limit
from tfpar import config
from tfpar.checkpoint import file_format
from tfpar.runs.directory import RunDirectory

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


def test_a_new_folder_is_created_with_all_its_parents_for_the_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "er" / "x")
    directory.claim(OTHER)
    assert config.load(directory.config) == OTHER


def test_a_claim_that_is_undone_leaves_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "x")
    directory.claim(RUN)
    directory.native_log.write_text("TensorFlow starts")
    directory.checkpoints.mkdir()
    directory.undo_claim()
    assert contents(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["metrics.jsonl", "tensorboard/events", "checkpoints/step-00000001.npz"])
def test_a_claim_is_kept_where_something_is_trained(tmp_path: Path, file: str) -> None:
    directory = RunDirectory(tmp_path / "x")
    directory.claim(RUN)
    (tmp_path / "x" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "x" / file).write_text("trained")
    before = contents(tmp_path)
    directory.undo_claim()
    assert contents(tmp_path) == before


def test_an_undone_claim_leaves_the_earlier_files(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.log").write_text("earlier")
    directory = RunDirectory(tmp_path)
    directory.claim(RUN)
    with pytest.raises(ValueError, match="Only one process"):
        (other := RunDirectory(tmp_path)).claim(RUN)
    before = contents(tmp_path)
    other.undo_claim()
    assert contents(tmp_path) == before, "the folder is another process's"
    directory.undo_claim()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorflow.log"]


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
    for way_out in (
        "Choose another --directory",
        f"resume that run with --directory {folder} alone",
        "delete the folder",
    ):
        assert way_out in message


def test_settings_that_change_no_weight_are_marked_in_their_sections() -> None:
    keys = [
        f"{section}.{key}" for section, table in RUN.model_dump().items() if isinstance(table, dict) for key in table
    ]
    assert {key for key in ["trainer", "seed", *keys] if not config.changes_weights(key)} == {
        *("training.epochs", "training.steps_per_call", "training.checkpoint_seconds", "training.keep_checkpoints"),
        "training.nonfinite_loss",
        *(f"strategy.{name}" for name in RUN.strategy.model_dump()),
        *("callbacks.tensorboard", "callbacks.report", "callbacks.save_best", "callbacks.check_replicas_every_steps"),
    }


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ('{kind="single_device"}', None),
        ('{kind="pipeline", num_stages=2, num_microbatches=4, schedule="gpipe"}', None),
        ('{kind="multi_worker", devices=["GPU:0"]}', None),
        (
            '{kind="multi_worker", sync="average", every=4}',
            "strategy.sync is not set there and average now; strategy.e",
        ),
        ('{kind="multi_worker", compression="bfloat16"}', "strategy.compression is not set there and bfloat16 now"),
    ],
)
def test_a_run_may_resume_under_a_strategy_of_the_same_weights(
    folder: Path, strategy: str, problem: str | None
) -> None:
    run = config.load(None, [f"strategy={strategy}"])
    if problem is None:
        RunDirectory(folder).claim(run)
    else:
        assert problem in refusal(folder, run)


def test_the_configuration_of_a_folder_is_that_of_its_run(folder: Path, tmp_path: Path) -> None:
    assert RunDirectory(folder).recorded() == folder / "config.toml"
    (tmp_path / "config.toml").write_text("seed = 1")
    assert RunDirectory(tmp_path).recorded() is None, "no run wrote it"
    (folder / "config.toml").write_text("[training\n")
    with pytest.raises(ValueError, match=r"config.toml cannot be read: .* Choose another --directory"):
        RunDirectory(folder).recorded()


def test_a_run_may_resume_with_other_settings_that_change_no_weight(folder: Path) -> None:
    before = contents(folder, without=[".lock"])
    overrides = ["training.epochs=20", "training.keep_checkpoints=9", "callbacks.tensorboard=false"]
    directory = RunDirectory(folder)
    directory.claim(config.load(None, overrides))
    assert directory.resumed == RUN
    assert contents(folder, without=[".lock"]) == before, "it is recorded when it trains"


RESULTS = {"epochs": 10, "steps": 240, "loss": 0.5}


def finished(folder: Path) -> RunDirectory:
    """The default run in a folder, trained to its end."""
    directory = RunDirectory(folder)
    directory.claim(RUN)
    directory.model.write_bytes(b"a model")
    directory.finish(RESULTS)
    return directory


def test_a_run_is_finished_when_its_results_are_those_of_as_many_epochs(folder: Path) -> None:
    first = RunDirectory(folder)
    first.claim(RUN)
    assert first.finished(RUN) is None
    del first
    directory = finished(folder)
    assert directory.finished(RUN) == RESULTS
    assert directory.finished(config.load(None, ["training.epochs=20"])) is None
    assert directory.finished(config.load(None, ["callbacks.tensorboard=false"])) == RESULTS
    directory.reopen()
    assert directory.finished(RUN) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", '{"epochs": 10}', '{"epochs": "10", "steps": 1}', "[" * 99_999]
)
def test_results_that_cannot_be_read_count_as_none(folder: Path, content: str) -> None:
    """A full disk, or a crash of the machine, can leave an empty file."""
    directory = finished(folder)
    directory.results.write_text(content)
    assert directory.finished(RUN) is None
    assert directory.broken() == ["results.json"]


def test_results_of_another_run_count_as_none(folder: Path, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.claim(RUN)
    other.finish(RESULTS)
    directory = finished(folder)
    directory.results.write_bytes(other.results.read_bytes())
    assert directory.finished(RUN) is None


@pytest.mark.parametrize("name", ["model.keras", "metrics.jsonl"])
@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!")], ids=["lost", "changed"]
)
def test_a_run_whose_files_are_lost_or_changed_is_not_finished(folder: Path, name: str, change: Any) -> None:
    directory = finished(folder)
    change(folder / name)
    assert directory.broken() == [name]
    assert directory.finished(RUN) is None


def test_an_option_that_is_no_number_is_the_same_when_the_run_resumes(tmp_path: Path) -> None:
    run = config.load(None, ["options.fill=nan"])
    RunDirectory(tmp_path).claim(run)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.npz").write_bytes(b"weights")
    RunDirectory(tmp_path).claim(config.load(tmp_path / "config.toml"))


def test_files_that_are_no_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    message = refusal(tmp_path, RUN)
    assert "must be empty or hold a run" in message
    assert "Choose another --directory" in message
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"], "nothing is added"


@pytest.mark.parametrize("others", [[], ["index.md"], ["metrics.jsonl", "model.keras"]])
@pytest.mark.parametrize("text", ['title = "My web site"\n', "# my notes\nseed = 0\n"], ids=["web site", "own run"])
def test_a_config_toml_that_no_run_wrote_is_never_replaced(tmp_path: Path, text: str, others: list[str]) -> None:
    """A web site's, or the file that --config itself names."""
    (tmp_path / "config.toml").write_text(text)
    for name in others:
        (tmp_path / name).write_text("somebody's")
    before = contents(tmp_path)
    assert "it holds files without a run.json: no run wrote them" in refusal(tmp_path, RUN)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["config.toml", ".lock", "metrics.jsonl"])
def test_a_link_in_the_place_of_a_runs_file_is_refused_and_not_followed(
    folder: Path, tmp_path: Path, name: str
) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(treasure)
    assert f"{folder / name} must be a file, and is not" in refusal(folder, RUN)
    assert treasure.read_text() == "gold"


def test_checkpoints_and_tensorboard_may_lie_on_another_disk(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints").rename(tmp_path / "disk")
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    RunDirectory(folder).claim(RUN)


# An identity


def test_a_run_keeps_its_identity_and_another_run_gets_another(folder: Path, tmp_path: Path) -> None:
    identities = []
    for path in (folder, folder, tmp_path / "other"):
        directory = RunDirectory(path)
        directory.claim(RUN)
        identities.append(directory.identity)
        del directory
    assert identities[0] == identities[1] != identities[2]


def test_a_run_json_that_cannot_be_read_is_written_again_from_the_checkpoints(folder: Path) -> None:
    path = folder / "checkpoints" / "step-00000002.npz"
    state = np.array(json.dumps({"run": "mine"}))
    file_format.write(path, {file_format.STATE: state}.items(), keep=9)
    (folder / "run.json").write_text("")
    directory = RunDirectory(folder)
    directory.claim(RUN)
    assert directory.identity == "mine"


def test_a_run_whose_configuration_is_lost_is_refused(folder: Path) -> None:
    (folder / "config.toml").unlink()
    before = contents(folder, without=[".lock"])
    assert "config.toml is missing, and the run cannot be identified without it" in refusal(folder, RUN)
    assert contents(folder, without=[".lock"]) == before


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


def test_a_folder_in_which_nothing_was_trained_can_be_claimed_by_another_run(tmp_path: Path) -> None:
    """So a mistyped setting, refused after the claim, does not block its own correction."""
    RunDirectory(tmp_path / "x").claim(OTHER)
    (tmp_path / "x" / "tensorflow.log").write_text("no GPU")
    RunDirectory(tmp_path / "x").claim(RUN)
    assert config.load(tmp_path / "x" / "config.toml") == RUN
