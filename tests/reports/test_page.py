"""The report of a run as a page: its sections, hostile names, runs with little in them, pictures; in a browser, too."""

import dataclasses
import io
import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support import recorded
from tests.support.recorded import HOSTILE, Page
from tfpar.reports import events, page, recorded_run, report_files
from tfpar.reports.recorded_run import RecordedRun

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PLAN = {
    "rows": [
        {
            **{"rank": 1, "layout": "SingleDevice", "step_seconds": 0.012, "examples_per_second": 5000, "times_one": 1},
            **{"memory_bytes": 4e8, "fits": True, "waits": {"bubble": 0.001}, "settings": {"kind": "auto"}},
            "measured_seconds": 0.011,
        },
        {"rank": None, "layout": HOSTILE, "step_seconds": 0.02, "fits": None, "waits": None, "measured_seconds": "x"},
    ],
    "notes": ["rows 1 and 2 are equal"],
}
PREDICTION = {"layout": "SingleDevice", "planned_step_seconds": 0.012, "planned_memory_bytes": 4e8}
PARITY = {
    **{"strategy": "Mirrored", "num_steps": 20, "tolerance": 1e-9, "equal": True},
    "weights": [{"name": HOSTILE, "after_first_step": 0.0, "after_last_step": 1e-12}],
    "logs": [{"name": "loss", "after_first_step": None, "after_last_step": 0.0}, 3],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with everything in it, and hostile names wherever a user chooses one."""
    lines = recorded.epochs(3, **{HOSTILE: 0.5, "f1": [0.1, 0.2]})
    toml = "[options]\nname = '''<script>alert(1)</script>'''"
    memory = {"process_peak_bytes": 1e9, "devices": [{"device": f"GPU:{one}", "peak_bytes": 3e8} for one in (0, 1)]}
    folder = recorded.write(
        tmp_path / "<b>run", toml, lines, record=recorded.record(memory=memory), plan=PLAN, prediction=PREDICTION,
        parity=PARITY,
    )  # fmt: skip
    events.append(folder, events.RESUMED, detail=f"after {HOSTILE}")
    events.append(folder, events.FAILED, 31, f"ValueError: {HOSTILE}")
    return folder


def size_of(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


def test_a_page_is_one_file_that_loads_nothing_and_escapes_all_names(folder: Path) -> None:
    report_files.write(folder)
    text = (folder / "report.html").read_text()
    read = Page(text)
    read.assert_loads_nothing()
    assert "<script" not in text
    assert "<b>run" not in text
    assert "\x1b" not in text
    assert read.words.count("<script>alert('x')</script>") >= 6, "shown as they are"
    assert "default-src 'none'" in text


def test_every_section_has_its_figures(folder: Path) -> None:
    text, images = page.report(recorded_run.read(folder))
    words = " ".join(Page(text).words.split())
    for part in (
        "failed",  # the state
        "1.25 times the speed (measured, at most)",
        "--set data.cache=true in another folder",
        "Squares and dashes: validation",
        "first call of a step, with compilation",
        "step12.0 ms10.0 ms+20 %",
        "rows 1 and 2 are equal",
        "SingleDevice (this run)",
        "as planned15.0 ms20.0 %",
        "as run15.0 ms",
        "GPU:1300 MB",
        "Resumptions: 1. Failures: 2.",
        "started, and killed or crashed",
        "Mirrored: equal to one device after 20 steps",
        "stage <0>",
        "training.global_batch_size64",
    ):
        assert part in words, part
    assert set(images) == {"metrics", "speed", "timeline", "plan", "memory"}


def test_pictures_are_files_too_and_those_of_an_earlier_report_go(folder: Path) -> None:
    report_files.write(folder)
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {"metrics.png", "speed.png", "timeline.png", "plan.png", "memory.png"}
    (folder / "plan.json").unlink()
    (folder / "report" / "mine.png").write_bytes(b"")
    report_files.write(folder)
    assert {path.name for path in (folder / "report").iterdir()} == names - {"plan.png"} | {"mine.png"}


def test_another_output_leaves_the_folder_as_it_is(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    assert report_files.write(folder, output=tmp_path / "here.html") == tmp_path / "here.html"
    assert sorted(folder.iterdir()) == before
    Page((tmp_path / "here.html").read_text()).assert_loads_nothing()


@pytest.mark.parametrize("lines", [[], [{"epoch": 1}], [{"epoch": 1, "step": 1, "loss": float("nan")}]])
def test_a_run_with_little_in_it_has_a_page_that_says_so(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    text, _ = page.report(recorded_run.read(recorded.write(tmp_path / "run", lines=lines)))
    read = Page(text)
    read.assert_loads_nothing()
    assert "No step was timed" in read.words
    assert "This run was not planned" in read.words
    assert "Not measured: a run measures its memory at its end." in read.words


def test_the_previewed_step_of_a_pipeline_is_named_as_one_without_update(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run", lines=recorded.epochs(1))
    previewed = {"layout": "Pipeline(2, 4)", "planned_step_seconds": None, "previewed_step_seconds": 0.012}
    (folder / "prediction.json").write_text(json.dumps(previewed | {"measured_step_seconds": 0.015}))
    words = Page(page.report(recorded_run.read(folder))[0]).words
    assert "step of the table of stages, without update12.0 ms15.0 ms-20 %" in "".join(words.splitlines())


def test_a_long_run_shows_some_epochs_and_all_in_the_picture(tmp_path: Path) -> None:
    run = recorded_run.read(recorded.write(tmp_path / "run", lines=recorded.epochs(2000)))
    text, _ = page.report(run)
    assert "every 10th epoch" in text
    assert text.count("<tr>") < 600


def test_tables_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    wrong = {"memory": [], "model": 3, "layout": None, "seconds": "x", "points": {}, "pipeline": 7, "versions": [1]}
    folder = recorded.write(tmp_path / "run", lines=recorded.epochs(1), record=wrong)
    (folder / "prediction.json").write_text('{"planned_step_seconds": "x", "measured_memory_bytes": []}')
    (folder / "parity.json").write_text('{"weights": {}, "equal": 1}')
    Page(page.report(recorded_run.read(folder))[0]).assert_loads_nothing()


def grey_pixels(png: bytes) -> Any:
    from matplotlib.image import imread

    return imread(io.BytesIO(png))[..., :3] @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize(("device", "is_said"), [("CPU", True), ("GPU", False)])
def test_the_memory_of_the_runtime_is_said_where_rows_alone_include_it(
    device: str, is_said: bool, tmp_path: Path
) -> None:
    plan = PLAN | {"measured": {"device": device, "runtime_bytes": 681_000_000}}
    folder = recorded.write(tmp_path / "run", "", recorded.epochs(1), plan=plan, prediction=PREDICTION)
    words = "includes 681 MB of TensorFlow's own, and above it does not."
    text = " ".join(Page(page.report(recorded_run.read(folder))[0]).words.split())
    assert (words in text) == is_said


def test_the_bars_of_planned_and_measured_differ_without_colour(folder: Path) -> None:
    _, images = page.report(recorded_run.read(folder))
    for png in images.values():
        assert zlib.crc32(png[12:29]) == struct.unpack(">I", png[29:33])[0], "a whole PNG header"
        width, height = size_of(png)
        assert 600 <= width <= 3000
        assert height >= 150
    assert len({round(float(value), 1) for value in grey_pixels(images["memory"]).ravel()}) >= 4


def test_a_curve_that_is_not_finite_has_gaps(tmp_path: Path) -> None:
    lines = recorded.epochs(3)
    lines[1]["loss"] = float("inf")
    run: RecordedRun = recorded_run.read(recorded.write(tmp_path / "run", lines=lines))
    assert page.report(run)[1]["metrics"][1:4] == b"PNG"
    assert page.report(dataclasses.replace(run, epochs=()))[1] == {}


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium on this machine")
def test_chromium_shows_the_page_with_all_pictures(folder: Path, tmp_path: Path) -> None:
    report_files.write(folder)
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    # Chromium writes the document as it has understood it: a script that ran would have changed it.
    shown = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom",
         (folder / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, shown.stderr
    read = Page(shown.stdout)
    read.assert_loads_nothing()
    assert len(read.of("img")) == 5
    assert "What would make it faster" in read.words
    screenshot = tmp_path / "page.png"
    subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path}", "--hide-scrollbars",
         "--window-size=1000,3000", f"--screenshot={screenshot}", (folder / "report.html").as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    pixels = grey_pixels(screenshot.read_bytes())
    assert pixels.shape == (3000, 1000)
    assert 0.01 < (pixels < 0.5).mean() < 0.5, "text and pictures on an empty ground"


def phases_of(folder: Path, row: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    moments = [[0.0, 0.1, 0.3, 0.4, 0.5], [0.05, 0.1, 0.3, 0.4, 0.5]]
    phases = {"names": ["forward", "backward", "all-reduce", "update"], "moments": moments}
    record = {**recorded.record(phases=phases), "pipeline": None}
    plan = {"rows": [{"layout": "Mirrored(2)", **row}]}
    recorded.write(folder, record=record, plan=plan, prediction={"layout": "Mirrored(2)"})
    text, images = page.report(recorded_run.read(folder))
    return " ".join(Page(text).words.split()), images


def test_phases_of_replicas_are_shown_as_planned_and_as_run(tmp_path: Path) -> None:
    row = {
        **{"step_seconds": 0.75, "forward_seconds": 0.125},
        "waits": {"network": 0.1875, "all-reduce": 0.0625, "data": 0.125},
    }
    words, images = phases_of(tmp_path / "run", row)
    for part in ("means of the replicas", "forward125 ms75.0 ms15 %", "backward250 ms200 ms40 %", "all-reduce250 ms"):
        assert part in words, (part, words[words.find("Phases of a step") :])
    assert "timeline" in images


@pytest.mark.parametrize(
    "row",
    [{}, {"step_seconds": float("nan"), "forward_seconds": 0.1, "waits": {}}, {"step_seconds": 1, "waits": [1]}],
    ids=str,
)
def test_phases_without_a_plan_of_them_are_shown_as_run(row: dict[str, Any], tmp_path: Path) -> None:
    words, images = phases_of(tmp_path / "run", row)
    assert "forward75.0 ms15 %" in words, words
    assert "timeline" in images


@pytest.mark.parametrize(
    "phases",
    [3, {}, {"names": ["forward"], "moments": [[0.0]]}, {"names": ["<b>"], "moments": [[0, 1]]}, {"names": ["update"],
     "moments": [[1, 0]]}],
    ids=str,
)  # fmt: skip
def test_damaged_phases_are_left_out(phases: Any, tmp_path: Path) -> None:
    recorded.write(tmp_path / "run", record={**recorded.record(phases=phases), "pipeline": None})
    text, images = page.report(recorded_run.read(tmp_path / "run"))
    assert "Timeline of a step" not in text
    assert "timeline" not in images
