"""The command of a planned layout trains that layout, whatever the configuration says of its own."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path

import pytest

from tests.planning.test_ranking import ONE, TWO, planned, step
from tfpar import config
from tfpar.planning.layouts import Layout
from tfpar.runs.plan_files import command_of, with_strategy, write

LAYOUTS = [ONE, TWO, dataclasses.replace(TWO, shard="optimizer"), Layout(1, 2, 4), Layout(num_shards=2)]
SECTIONS = [
    "",
    'kind = "mirrored"\nshard = "weights"\nnum_logical_cpus = 2',
    'kind = "pipeline"\nnum_stages = 2\nnum_microbatches = 4\nnum_shards = 2\nschedule = "gpipe"\nrecompute = true',
    'kind = "hybrid"\nnum_replicas = 2\nnum_stages = 2\nnum_microbatches = 2\nallow_batch_dependent_layers = true',
    'kind = "tensor_parallel"\nnum_shards = 4\nnum_replicas = 2',
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("override", [[], ["training.epochs=3", "strategy={kind='mirrored', pack_bytes=1024}"]])
def test_the_command_gives_the_layout_of_the_plan(
    tmp_path: Path, section: str, layout: Layout, override: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[strategy]\n{section}\n" if section else "")
    plan = planned([step(layout, 1.0)])
    assert plan.taken is not None
    words = shlex.split(command_of(plan, str(file), override))
    overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
    assert words[:5] == ["python", "-m", "tfpar.train", "--config", str(file)]
    assert config.load(file, overrides) == with_strategy(config.load(file, override), plan.taken.settings)


@pytest.mark.parametrize(
    ("layout", "devices", "number"),
    [
        (Layout(2), ["CPU:0", "CPU:1"], 2),
        (Layout(1, 4, 4, num_hosts=2, across_hosts=True), ["CPU:1", "CPU:3"], 4),
        (Layout(2, num_hosts=2), ["CPU:0", "CPU:1"], None),  # one device of each host, which is there anyway
        (Layout(2), ["GPU:0", "GPU:1"], None),
    ],
    ids=str,
)
def test_a_run_makes_the_logical_cpus_that_the_plan_names(
    layout: Layout, devices: list[str], number: int | None, tmp_path: Path
) -> None:
    plan = planned([step(layout, 1.0)])
    assert plan.taken is not None
    named = dataclasses.replace(plan.taken, settings=layout.settings_on(devices))
    plan = dataclasses.replace(plan, taken=named)
    words = shlex.split(command_of(plan, None, []))
    assert [word for word in words if "num_logical_cpus" in word] == (
        [] if number is None else [f"strategy.num_logical_cpus={number}"]
    )
    write(config.Run(), plan, tmp_path / "plan.toml")
    strategy = config.load(tmp_path / "plan.toml", []).strategy
    assert strategy.num_logical_cpus == (number or 1)


def test_the_command_of_a_written_file_starts_the_workers_that_its_layout_has(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    one = write(config.Run(), planned([step(ONE, 1.0)]), path)
    assert shlex.split(one) == ["python", "-m", "tfpar.train", "--config", str(path)]
    two = write(config.Run(), planned([step(Layout(2, num_hosts=2), 1.0)]), path)
    assert shlex.split(two)[:3] == ["python", "-m", "tfpar.launch"]
    assert two in path.read_text()
