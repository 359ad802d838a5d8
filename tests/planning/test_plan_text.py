"""A plan as text, as JSON and as a table for notebooks: measured figures alone."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import shlex
import subprocess

import pytest

from tfpar.layout import Layout
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Devices, Measured, NotMeasured, Plan, ranked

FACTS = ModelFacts("mlp", 124_000_000, 64, 498_000_000, (498_000_000,), 995_000_000)
SHARDED = Layout(4, shard="optimizer")
COMMAND = "python -m tfpar.train --config run.toml --set strategy.kind=mirrored --set strategy.shard=optimizer"


def plan_of(facts: ModelFacts = FACTS, kind: str = "GPU", memory_bytes: int | None = 40 * 10**9) -> Plan:
    measured = {
        SHARDED: Measured((0.21, 0.212, 0.22), 14_100_000_000),
        Layout(2, 2, 8): Measured((0.23, 0.231, 0.232), 9 * 10**9),
        Layout(): Measured((0.76, 0.764, 0.77)),
    }
    others = [
        NotMeasured(Layout(4), "needs at least 42.0 GB, a device has 40.0 GB"),
        *(NotMeasured(Layout(1, 4, number), "the budget of 45 s was spent") for number in range(4, 12)),
    ]
    devices = Devices(kind, 4, memory_bytes=memory_bytes)
    details = {"seconds": 38.0, "budget_seconds": 45.0, "not_considered": ("gpipe (no)",), "command": COMMAND}
    return ranked(measured, facts, devices, lambda layout: layout.settings, others, **details)


def test_the_text_has_what_was_measured_in_80_columns() -> None:
    text = str(plan_of())
    assert max(map(len, text.splitlines())) <= 80
    assert "devices    4 GPUs, each with 40.0 GB\n" in text
    assert "measured   3 of 12 layouts in 38.0 s, of a budget of 45.0 s\n" in text
    assert '1   Mirrored(4, shard="optimizer")     212 ms   1.2 %        302  3.60   14.1 GB\n' in text
    assert "3   SingleDevice                       764 ms   0.3 %         84     1         ?\n" in text
    assert "Take 1:    python -m tfpar.train --config run.toml" in text
    assert "Logical CPUs" not in text


def test_a_layout_that_was_not_measured_has_a_reason_and_no_step() -> None:
    words = " ".join(str(plan_of()).split())
    assert "Not measured: Mirrored(4) (needs at least 42.0 GB, a device has 40.0 GB)." in words
    assert "Pipeline(4, 9), 2 more (the budget of 45 s was spent)." in words
    assert "Not considered: gpipe (no)." in words
    table = json.loads(plan_of().to_json())
    assert table["not_measured"][0] == {
        "layout": "Mirrored(4)",
        "reason": "needs at least 42.0 GB, a device has 40.0 GB",
    }
    assert all(set(row) == {"layout", "reason"} for row in table["not_measured"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"facts": dataclasses.replace(FACTS, normalizing=("norm",))}, "norm: normalizes each part of a batch"),
        ({"facts": dataclasses.replace(FACTS, wait_seconds=0.5)}, "Reading a batch takes 500 ms, longer than"),
        ({"kind": "CPU"}, "Logical CPUs share the cores and memory of one machine"),
    ],
    ids=["normalization", "data", "logical CPUs"],
)  # fmt: skip
def test_what_a_reader_must_know_of_the_figures_is_said(change: dict[str, object], said: str) -> None:
    assert said in " ".join(str(plan_of(**change)).split())  # type: ignore[arg-type]
    assert said not in " ".join(str(plan_of()).split())


def test_equal_rows_have_an_equals_sign() -> None:
    measured = {Layout(): Measured((0.2, 0.3)), Layout(2): Measured((0.2, 0.28)), Layout(4): Measured((0.9,))}
    text = str(ranked(measured, FACTS, Devices("GPU", 4), lambda layout: layout.settings))
    assert "\n1=  SingleDevice" in text
    assert "\n1=  Mirrored(2)" in text
    assert "\n3   Mirrored(4)" in text
    assert "Rows of the same rank are equal within their spreads; the simplest is first." in text


def test_a_plan_without_rows_says_so() -> None:
    text = str(ranked({}, FACTS, Devices("GPU", 1), lambda layout: layout.settings))
    assert "No layout could be measured." in text
    assert "step" not in text.partition("No layout")[0].replace("steps", "")


@pytest.mark.parametrize(
    "words",
    [
        shlex.split(COMMAND),
        [*shlex.split(COMMAND), "--directory", "d/" * 100],
        [*shlex.split(COMMAND), "--config", "a folder/" * 20, "--set", 'strategy={kind="mirrored"}'],
        ["python", "-m", "tfpar.train", "--config", "x" * 66],
    ],
)
def test_the_command_can_be_copied_into_a_shell(words: list[str]) -> None:
    plan = dataclasses.replace(plan_of(memory_bytes=None), command=shlex.join(words), not_considered=(), others=())
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    copied = text[text.index("Take 1:") + len("Take 1:") :].strip()
    said = subprocess.run(["sh", "-c", f"printf '%s\\0' {copied}"], capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[:-1] == words


def test_json_has_the_plan() -> None:
    table = json.loads(plan_of().to_json())
    assert (table["batch"], table["command"], table["budget_seconds"]) == (64, COMMAND, 45.0)
    assert table["devices"] == {"kind": "GPU", "number": 4, "num_workers": 1, "memory_bytes": 40 * 10**9}
    assert table["rows"][0] == {
        "rank": 1, "layout": 'Mirrored(4, shard="optimizer")', "step_seconds": 0.212,
        "spread_seconds": pytest.approx(0.005 / 2), "laps_seconds": [0.21, 0.212, 0.22],
        "examples_per_second": pytest.approx(301.9, rel=1e-3), "times_one": pytest.approx(3.6, rel=1e-2),
        "memory_bytes": 14_100_000_000, "settings": {"kind": "mirrored", "shard": "optimizer"},
    }  # fmt: skip


class Tags(html.parser.HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_a_table_in_which_names_are_text() -> None:
    page = Tags()
    page.feed(plan_of(dataclasses.replace(FACTS, name="<script>alert(1)</script>"))._repr_html_())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert page.tags.count("tr") == 4
