"""`python -m tfpar.report`: one run again, several compared, bad input; without TensorFlow, in 80 columns."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import recorded
from tests.support.recorded import HOSTILE, Page, call_report
from tfpar.reports import comparison, recorded_run

MIRRORED = '[training]\nepochs = 3\n[strategy]\nkind = "mirrored"\nnum_logical_cpus = 2'


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, `runs/one` and `runs/two`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    recorded.write(Path("runs/one"), "[training]\nepochs = 2", recorded.epochs(2), record=recorded.record())
    recorded.write(Path("runs/two"), MIRRORED, recorded.epochs(3, 2.0))
    return Path("runs")


def test_one_run_gets_its_report_again_without_tensorflow(runs: Path) -> None:
    (Path.cwd() / "tensorflow.py").write_text("raise ImportError('TensorFlow must not start')")
    done = subprocess.run(
        [sys.executable, "-m", "tfpar.report", "runs/one"],
        env={"PYTHONPATH": f"{Path.cwd()}:{ROOT}", "COLUMNS": "80"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    Page((runs / "one" / "report.html").read_text()).assert_loads_nothing()
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    columns = {line.index(line.split(maxsplit=2)[1]) for line in (lines[0], lines[-1])}
    assert (lines[-1].split(), len(columns)) == (["report", "runs/one/report.html"], 1), lines
    assert any(line.split() == ["step", "10.0", "ms"] for line in lines), lines


def test_several_runs_are_compared_by_settings_and_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_report("runs/one", "runs/two") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80, printed
    one, two = printed.split("\n\n")[:2]
    assert "training.epochs" in one
    assert '"mirrored"' in two
    assert "strategy.all_reduce" not in one, "it has no such setting"
    read = Page(Path("comparison.html").read_text())
    read.assert_loads_nothing()
    words = " ".join(read.words.split())
    assert "training.epochs23" in words
    assert "loss0.50000.6667" in words
    assert "data.cache" not in words, "it is equal"
    assert len(read.of("svg")) == len(read.of("table")) == 1
    assert not (runs / "one" / "report.html").exists()


def test_the_layout_that_auto_chose_is_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = '[strategy]\nkind = "auto"\nnum_logical_cpus = 4'
    layouts = {"chosen": "Hybrid(2 x Pipeline(2, 4))", "other": "Mirrored(4)"}
    for name, layout in layouts.items():
        recorded.write(runs / name, auto, recorded.epochs(1), record={"layout": {"strategy": layout}})
    recorded.write(runs / "damaged", auto, recorded.epochs(1), record={"layout": {"strategy": [HOSTILE]}})
    assert call_report("runs/chosen", "runs/other", "runs/damaged", "runs/two", "runs/one") == 0
    chosen, other, damaged, two, one = capsys.readouterr().out.split("\n\n")[:5]
    assert ["layout", "Hybrid(2 x Pipeline(2, 4))"] in [line.split(maxsplit=1) for line in chosen.splitlines()]
    assert ["layout", "Mirrored(4)"] in [line.split(maxsplit=1) for line in other.splitlines()]
    assert "layout" not in damaged + two, "it is not known"
    assert "layout Pipeline on CPU:0, CPU:1" in " ".join(one.split()), one
    words = " ".join(Page(Path("comparison.html").read_text()).words.split())
    assert "layoutHybrid(2 x Pipeline(2, 4))Mirrored(4)--Pipeline on CPU:0, CPU:1" in words


def test_runs_of_the_same_name_are_told_by_their_paths(runs: Path) -> None:
    recorded.write(Path("other/one"))
    found = [recorded_run.read(folder) for folder in (runs / "one", runs / "two", Path("other/one"))]
    assert list(comparison.names(found)) == ["runs/one", "two", "other/one"]


def test_equal_settings_and_hostile_names_have_a_page(tmp_path: Path) -> None:
    names = (HOSTILE.replace("/", ""), "b" * 200)
    found = [recorded_run.read(recorded.write(tmp_path / name, lines=recorded.epochs(1))) for name in names]
    read = Page(comparison.comparison(found))
    read.assert_loads_nothing()
    assert "All settings are equal." in read.words
    text = comparison.text(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name the folder of a run, or of several."),
        (["runs/nothing"], "runs/nothing does not exist."),
        (["runs"], "with a config.toml, and runs holds none."),
        (["runs/one/config.toml"], "runs/one/config.toml is a file."),
        (["runs/one", "runs/../runs/one"], "must be different folders"),
        (["runs/one", "runs/two", "runs/three"], "runs/three does not exist."),
        (["runs/one"] * 51, "At most 50 runs can be compared, received 51."),
        (["x" * 300], "File name too long"),
    ],
    ids=["none", "missing", "no run", "file", "twice", "one of three", "many", "long"],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_report(*arguments) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("output", ["runs", "", "missing/here.html"])
def test_an_output_that_cannot_be_written_is_one_sentence(
    output: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_report("runs/one", f"--output={output}") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


def test_a_run_that_still_trains_is_reported_until_now(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs / "one" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert call_report("runs/one", "--output=until_now.html") == 0
        assert "still training" in capsys.readouterr().out
        recorded.write(Path("runs/new"), MIRRORED, recorded.epochs(1))
        assert call_report("runs/new") == 0
        assert " 1 epoch, " in capsys.readouterr().out
        assert call_report("runs/one", "runs/two") == 0
    assert "one is still training" in Path("comparison.html").read_text()


def test_damaged_metrics_are_noted_and_the_rest_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')
    assert call_report("runs/one") == 0
    assert "Line 3 of metrics.jsonl cannot be read" in " ".join(capsys.readouterr().out.split())
