"""A plan as text, as JSON and as HTML."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import shlex
import subprocess

import pytest

from tests.planning.test_ranking import FOUR, GB, GPUS, MODEL, ONE, SHARDED, TWO, planned, step, with_memory
from tfpar.planning.costs import MachineCosts
from tfpar.planning.layouts import Layout, Refusal, candidates
from tfpar.planning.plan import Plan
from tfpar.planning.ranking import rank
from tfpar.planning.rows import PredictedStep

LONGEST = Layout(1024, 64, 8192, "zero_bubble", True, "optimizer", 1, 128)
COMMAND = "python -m tfpar.train --config run.toml --set strategy.kind=mirrored --set strategy.shard=optimizer"


def large_plan(machine: MachineCosts = GPUS) -> Plan:
    steps, refusals = [], []
    for one in candidates(32, 1, batch=64, num_blocks=20, divides_layers=True):
        if isinstance(one, Refusal):
            refusals.append(one)
        else:
            waits = {"bubble": 0.01 * one.num_stages, "all-reduce": 0.02, "update": 0.005, "data": 0.01}
            steps.append(PredictedStep(one, 3.0 / one.num_devices + 0.01, waits, 10**11 // one.num_devices, 200))
    return rank(steps, refusals, MODEL, machine)


@pytest.mark.parametrize(
    "plan",
    [
        large_plan(),
        large_plan(with_memory(4)),
        large_plan(with_memory(0.001)),
        planned([step(ONE, 1e-7), step(LONGEST, 12345.6, 98765, 10**9)], with_memory(123)),
        rank([step(ONE, 1.0)], [], dataclasses.replace(MODEL, name="m" * 500, num_parameters=10**15), GPUS),
        dataclasses.replace(planned([step(ONE, 1.0)]), command=f"{COMMAND} --directory {'d' * 40}"),
        dataclasses.replace(planned([step(ONE, 1.0)]), history="e" * 300, notes=("n" * 200,)),
    ],
)
def test_the_text_fits_80_columns(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)


def test_the_head_says_whether_the_rows_give_the_same_result() -> None:
    steps = [step(ONE, 1.0), step(TWO, 0.6)]
    assert "64 examples; each row gives the same result\n" in str(planned(steps))
    alone = dataclasses.replace(MODEL, batch=1, normalizing=("normal",))
    assert "batch      1 example; each row gives the same result\n" in str(rank(steps[:1], [], alone, GPUS))
    assert "1 example; normalization makes the rows differ, see below\n" in str(rank(steps, [], alone, GPUS))


def test_a_row_has_its_figures_and_what_it_waits_for() -> None:
    waits = {"all-reduce": 0.019, "bubble": 0.0}
    plan = planned([PredictedStep(SHARDED, 0.212, waits, 14_100_000_000), step(ONE, 0.764, 51, 48)], with_memory(40))
    text = str(plan)
    assert "#   layout                                step examples/s  x one     memory fits" in text
    assert '1   Mirrored(4, shard="optimizer")      212 ms        302   3.60    14.1 GB  yes' in text
    assert "\n    waits for all-reduce 9 %\n" in text
    assert "-   SingleDevice                        764 ms         84      1    51.0 GB   no" in text
    assert "\n    lacks 11.0 GB on a device; fits at batch 48\n" in text


@pytest.mark.parametrize(("hosts", "is_said"), [(1, False), (2, True)])
def test_a_command_of_several_hosts_says_where_to_start_it(hosts: int, is_said: bool) -> None:
    plan = planned([step(Layout(4, num_hosts=hosts), 0.2)])
    words = "Start it on each host, with the names or addresses of all hosts"
    assert words not in str(plan), "without a command"
    assert (words in str(dataclasses.replace(plan, command=COMMAND))) == is_said


def test_equal_rows_have_an_equals_sign() -> None:
    text = str(planned([step(TWO, 0.2), step(FOUR, 0.2), step(ONE, 0.4)]))
    assert "\n1=  Mirrored(2)" in text
    assert "\n1=  Mirrored(4)" in text
    assert "\n3   SingleDevice" in text


def test_largest_batches_are_listed_by_rank_and_by_name_for_equal_rows() -> None:
    steps = [step(TWO, 0.2, 1, 290), step(FOUR, 0.1, 1, 174), step(ONE, 0.4, 1, 90), step(SHARDED, 0.4, 1, 80)]
    plan = planned(steps, with_memory(40))
    assert plan.largest_batches == {
        "Mirrored(4)": 174, "Mirrored(2)": 290, "SingleDevice": 90, 'Mirrored(4, shard="optimizer")': 80,
    }  # fmt: skip
    expected = 'Largest global batch that fits: 1: 174, 2: 290, SingleDevice: 90, Mirrored(4, shard="optimizer"): 80.'
    assert expected in " ".join(str(plan).split())


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
    plan = dataclasses.replace(planned([step(ONE, 1.0)]), command=shlex.join(words), not_considered=())
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    copied = text[text.index("Take 1:") + len("Take 1:") :].strip()
    said = subprocess.run(["sh", "-c", f"printf '%s\\0' {copied}"], capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[:-1] == words


def test_long_tables_say_how_many_rows_are_left_out_and_json_has_all() -> None:
    plan = large_plan()
    lines = str(plan).splitlines()
    table = lines[5 : lines.index("", 5)]
    shown = [line for line in table if line[:1].isdigit()]
    assert len(shown) == 9
    assert "SingleDevice" in shown[8], "the row to which each speed-up refers"
    more = f"    {len(plan.rows) - 9} more rank no higher, or do not fit: --json and plan.rows have all."
    assert lines[lines.index(more) + 1] == "", "the line ends the table"
    assert len(lines) <= 40
    assert len(json.loads(plan.to_json())["rows"]) == len(plan.rows)


@pytest.mark.parametrize("gigabytes", [4, 0.001])
def test_one_device_has_a_row_also_where_many_others_are_nearer_to_fit(gigabytes: float) -> None:
    plan = large_plan(with_memory(gigabytes))
    assert plan.rows[-1].layout == ONE
    rows = [line for line in str(plan).splitlines() if "SingleDevice" in line and "100 GB" in line]
    assert len(rows) == 1


def test_json_has_the_plan() -> None:
    plan = dataclasses.replace(planned([step(ONE, 0.764, 51, 48), step(FOUR, 0.2)], with_memory(40)), command=COMMAND)
    found = json.loads(plan.to_json())
    assert set(found) == {
        "model", "measured", "rows", "take", "command", "notes", "largest_batches", "not_considered",
    }  # fmt: skip
    assert (found["take"], found["command"]) == ("Mirrored(4)", COMMAND)
    assert found["measured"]["memory_bytes"] == 40 * GB
    assert found["rows"][0] == {
        "rank": 1, "layout": "Mirrored(4)", "step_seconds": 0.2, "examples_per_second": 320.0,
        "times_one": pytest.approx(3.82), "memory_bytes": GB, "fits": True, "lacks": "", "largest_batch": None,
        "waits": {"bubble": 0.0}, "settings": {"kind": "mirrored"}, "measured_seconds": None, "forward_seconds": None,
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
    model = dataclasses.replace(MODEL, name="<script>alert(1)</script>")
    plan = rank([step(ONE, 1.0), step(SHARDED, 0.5)], [], model, GPUS)
    page = Tags()
    page.feed(plan._repr_html_())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert page.tags.count("tr") == 3
    assert 'Mirrored(4, shard="optimizer")' in page.text
