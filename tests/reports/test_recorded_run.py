"""What a run directory records, read without TensorFlow: missing and damaged files, events, runs that still train."""

import fcntl
import json
from pathlib import Path

import pytest

from tests.support import recorded
from tfpar.reports import events, recorded_run, timelines


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "holds none"),
    ],
    ids=["missing", "file", "no run"],
)
def test_what_is_no_run_is_refused_in_one_sentence(make: object, said: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(ValueError, match=said):
        recorded_run.read(tmp_path / "run")


def test_a_run_has_all_settings_with_their_defaults_and_its_figures(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run", "[training]\nepochs = 3", recorded.epochs(2), record=recorded.record())
    run = recorded_run.read(folder)
    assert (run.settings["training.epochs"], run.settings["data.cache"]) == (3, False)
    assert run.step_seconds == pytest.approx(0.01)
    assert run.pipeline == recorded.pipeline()
    assert (run.status, run.notes) == ("not ended", ())


def test_damaged_files_are_notes_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run", "[training\n", recorded.epochs(3))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1][:9]}\n{lines[2]}\n")
    for name in ("results.json", "record.json", "plan.json", "parity.json"):
        (folder / name).write_text("[1")
    (folder / "events.jsonl").write_bytes(b'\xff\n[]\n{"time": "t", "event": "trained", "step": true}\n')
    run = recorded_run.read(folder)
    assert [entry["epoch"] for entry in run.epochs] == [1, 3]
    assert [event.kind for event in run.events] == ["trained"]
    for words in ("Line 2 of metrics.jsonl", "2 lines of events.jsonl", "config.toml is not", "record.json is damaged"):
        assert any(words in note for note in run.notes), run.notes


@pytest.mark.parametrize(
    ("number", "of_events", "of_metrics"),
    [
        (1, "1 line of events.jsonl is", ("Line 1 of", "lacks it.")),
        (2, "2 lines of events.jsonl are", ("Lines 1, 2", "them.")),
    ],
)
def test_notes_about_damaged_lines_are_in_singular_or_plural(
    number: int, of_events: str, of_metrics: tuple[str, str], tmp_path: Path
) -> None:
    folder = recorded.write(tmp_path / "run")
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_text("{\n" * number)
    notes = recorded_run.read(folder).notes
    assert f"{of_events} damaged and left out." in notes
    assert any(note.startswith(of_metrics[0]) and note.endswith(of_metrics[1]) for note in notes), notes


def test_settings_of_another_version_are_read_as_they_are(tmp_path: Path) -> None:
    run = recorded_run.read(recorded.write(tmp_path / "run", "[training]\nepochs = 3\nfrom_the_future = 1"))
    assert run.settings == {"training.epochs": 3, "training.from_the_future": 1}


def test_a_run_whose_folder_is_locked_still_trains(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run")
    with (folder / ".lock").open("wb") as lock:
        assert recorded_run.read(folder).status == "not ended"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert recorded_run.read(folder).status == "training"


def test_events_survive_half_a_line_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    events.append(tmp_path, events.STARTED, 0)
    with (tmp_path / events.NAME).open("a") as file:
        file.write('{"time": "2026')  # a crash
    events.append(tmp_path, events.RESUMED, detail="two\nlines" + "x" * 1000)
    events.append(tmp_path, events.FAILED, 7, "ValueError: no")
    events.append(tmp_path / "gone", events.FAILED)
    found, num_damaged = events.read(tmp_path)
    assert [(event.kind, event.step) for event in found] == [("started", 0), ("resumed", None), ("failed", 7)]
    assert num_damaged == 1
    assert len(found[1].detail) <= 300
    assert events.status(found) == "failed"
    assert [event.kind for event in events.lost_ends(found)] == ["started"]
    assert not (tmp_path / "gone").exists()


def test_events_are_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("mine")
    (tmp_path / events.NAME).symlink_to(tmp_path / "users.txt")
    events.append(tmp_path, events.STARTED)
    assert (tmp_path / "users.txt").read_text() == "mine"


def test_a_pipeline_survives_json_and_damage_is_no_pipeline() -> None:
    table = json.loads(json.dumps(timelines.to_table(recorded.pipeline(measured=False))))
    assert timelines.from_table(table) == recorded.pipeline(measured=False)
    for damaged in ({}, [], 3, {**table, "planned": {"spans": [[1]]}}, {**table, "schedule": "x"}):
        assert timelines.from_table(damaged) is None
