"""The report of a run as a page: its sections, hostile names, runs with little in them, pictures; in a browser, too."""

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import recorded
from tests.support.recorded import HOSTILE, Page
from tfpar.reports import events, page, recorded_run, report_files
from tfpar.reports.recorded_run import RecordedRun

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
PLAN = {
    "rows": [
        {"rank": 1, "layout": "SingleDevice", "step_seconds": 0.012, "memory_bytes": 4e8, "fits": True, "waits": {}},
        {"rank": None, "layout": HOSTILE, "step_seconds": "x", "memory_bytes": -1.0, "fits": None, "waits": None},
        3,
    ],
}
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
        tmp_path / "<b>run", toml, lines, record=recorded.record(memory=memory), plan=PLAN, parity=PARITY
    )
    events.append(folder, events.RESUMED, detail=f"after {HOSTILE}")
    events.append(folder, events.FAILED, 31, f"ValueError: {HOSTILE}")
    return folder


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
    read = Page(page.report(recorded_run.read(folder)))
    words = " ".join(read.words.split())
    for part in (
        "failed",  # the state
        "1.25 times the speed (measured, at most)",
        "--set data.cache=true in another folder",
        "first call of a step, with compilation",
        "as planned15.0 ms20.0 %",
        "as run15.0 ms",
        "GPU:1300 MB",
        "1SingleDevice12.0 ms400 MByes",
        "Resumptions: 1. Failures: 2.",
        "started, and killed or crashed",
        "Mirrored: equal to one device after 20 steps",
        "stage <0>",
        "training.global_batch_size64",
    ):
        assert part in words, part
    titles = ["loss", HOSTILE.replace("\x1b", "\ufffd"), "examples/s", "waiting for data, %", "Timeline of a step"]
    assert [title for title in titles if title not in words] == []
    assert len(read.of("svg")) == len(titles)


def test_another_output_leaves_the_folder_as_it_is(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    assert report_files.write(folder, output=tmp_path / "here.html") == tmp_path / "here.html"
    assert sorted(folder.iterdir()) == before
    Page((tmp_path / "here.html").read_text()).assert_loads_nothing()


@pytest.mark.parametrize("lines", [[], [{"epoch": 1}], [{"epoch": 1, "step": 1, "loss": float("nan")}]])
def test_a_run_with_little_in_it_has_a_page_that_says_so(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    read = Page(page.report(recorded_run.read(recorded.write(tmp_path / "run", lines=lines))))
    read.assert_loads_nothing()
    assert "No step was timed" in read.words
    assert "Not measured: a run measures its memory at its end." in read.words


def test_flops_and_mfu_are_among_the_first_figures(tmp_path: Path) -> None:
    results = recorded.epochs(1)[0] | {"flops_per_step": 2.56e10, "mfu": 0.413}
    run = recorded_run.read(recorded.write(tmp_path / "run", lines=recorded.epochs(1), results=results))
    assert page.headline(run)["FLOPs"] == "25.6 GFLOP a step, MFU 41.3 %"


def test_a_long_run_shows_some_epochs_and_all_in_the_picture(tmp_path: Path) -> None:
    run = recorded_run.read(recorded.write(tmp_path / "run", lines=recorded.epochs(2000)))
    text = page.report(run)
    assert "every 10th epoch" in text
    assert text.count("<tr>") < 600


def test_tables_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    wrong = {"memory": [], "model": 3, "layout": None, "seconds": "x", "points": {}, "pipeline": 7, "versions": [1]}
    folder = recorded.write(tmp_path / "run", lines=recorded.epochs(1), record=wrong)
    (folder / "plan.json").write_text('{"rows": {"layout": "x"}}')
    (folder / "parity.json").write_text('{"weights": {}, "equal": 1}')
    Page(page.report(recorded_run.read(folder))).assert_loads_nothing()


def test_a_curve_that_is_not_finite_has_gaps(tmp_path: Path) -> None:
    lines = recorded.epochs(3)
    lines[1]["loss"] = float("inf")
    run: RecordedRun = recorded_run.read(recorded.write(tmp_path / "run", lines=lines))
    assert len(Page(page.report(run)).of("svg")) == 3
    assert Page(page.report(dataclasses.replace(run, epochs=()))).of("svg") == []


def test_pictures_take_the_colour_of_the_text(folder: Path) -> None:
    text = page.report(recorded_run.read(folder))
    assert text.count("fill: currentColor") > 20
    assert "prefers-color-scheme: dark" in text
    for colour in ("#000000", "#010203", "#e4e4e4", "fill: #ffffff; stroke"):
        assert colour not in text.lower().partition("timeline of a step")[0], colour


def browse(tmp_path: Path, *arguments: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, *FLAGS, f"--user-data-dir={tmp_path}", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return shown.stdout


with_a_browser = pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium on this machine")


@with_a_browser
def test_chromium_shows_the_page_with_all_pictures(folder: Path, tmp_path: Path) -> None:
    report_files.write(folder)
    # Chromium writes the document as it has understood it: a script that ran would have changed it.
    read = Page(browse(tmp_path, "--dump-dom", (folder / "report.html").as_uri()))
    read.assert_loads_nothing()
    assert len(read.of("svg")) == 5
    assert "What would make it faster" in read.words


@pytest.mark.few(1)
@with_a_browser
@pytest.mark.parametrize(("scheme", "is_dark"), [(1, False), (0, True)])
def test_chromium_shows_it_light_and_dark(scheme: int, is_dark: bool, folder: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    report_files.write(folder)
    png = tmp_path / "page.png"
    flags = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,3000", f"--screenshot={png}"]
    browse(tmp_path, *flags, (folder / "report.html").as_uri())
    grey = imread(png)[..., :3] @ [0.299, 0.587, 0.114]
    assert grey.shape == (3000, 1000)
    ground = (grey < 0.5).mean()
    assert 0.85 < ground < 0.99 if is_dark else 0.01 < ground < 0.15, "text and pictures on an empty ground"


@with_a_browser
def test_a_phone_shows_it_without_scrolling_sideways(folder: Path, tmp_path: Path) -> None:
    report_files.write(folder)
    text = (folder / "report.html").read_text().replace("<meta http-equiv", "<meta name")
    measure = "document.title = document.documentElement.scrollWidth"
    (tmp_path / "inside.html").write_text(text.replace("</body>", f"<script>{measure}</script></body>"))
    frame = '<iframe width="390" height="800" style="border: 0" src="inside.html" onload="{}"></iframe>'
    copy = "document.body.append('width=' + this.contentDocument.title)"
    (tmp_path / "phone.html").write_text(frame.format(copy))
    outside = (tmp_path / "phone.html").as_uri()
    assert "width=390<" in browse(tmp_path, "--allow-file-access-from-files", "--dump-dom", outside)
