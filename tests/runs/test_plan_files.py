"""The command of a planned layout trains that layout, whatever the configuration says of its own."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path

import pytest

from tfpar import config
from tfpar.layout import Layout
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Devices, Measured, Plan, ranked
from tfpar.runs.planning.plan_devices import PlanDevices
from tfpar.runs.planning.plan_files import train_command, with_strategy, write

ONE, TWO = Layout(), Layout(2)
GPUS = PlanDevices(("GPU:0", "GPU:1"))
LAYOUTS = [ONE, TWO, dataclasses.replace(TWO, shard="optimizer"), Layout(1, 2, 4), Layout(num_shards=2)]
SECTIONS = [
    "",
    'kind = "mirrored"\nshard = "weights"\nnum_logical_cpus = 2\nrecompute = ["dense*"]',
    'kind = "pipeline"\nnum_stages = 2\nnum_microbatches = 4\nnum_shards = 2\nschedule = "gpipe"\nrecompute = true',
    'kind = "hybrid"\nnum_replicas = 2\nnum_stages = 2\nnum_microbatches = 2\nallow_batch_dependent_layers = true',
    'kind = "tensor_parallel"\nnum_shards = 4\nnum_replicas = 2',
]


def plan_of(layout: Layout, devices: PlanDevices = GPUS) -> Plan:
    facts, number = ModelFacts("mlp", 100, 64, 400, (400,), 0), len(devices.names)
    return ranked({layout: Measured((0.1,))}, facts, Devices(devices.kind, number), devices.settings_of)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("override", [[], ["training.epochs=3", "strategy={kind='mirrored', pack_bytes=1024}"]])
def test_the_command_gives_the_layout_of_the_plan(
    tmp_path: Path, section: str, layout: Layout, override: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[strategy]\n{section}\n" if section else "")
    plan = plan_of(layout)
    assert plan.best is not None
    words = shlex.split(train_command(plan, str(file), override))
    overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
    assert words[:5] == ["python", "-m", "tfpar.train", "--config", str(file)]
    assert config.load(file, overrides) == with_strategy(config.load(file, override), plan.best.settings)


@pytest.mark.parametrize(
    ("layout", "devices", "number"),
    [
        (TWO, PlanDevices(("CPU:0", "CPU:1")), 2),
        (TWO, PlanDevices(("CPU:1", "CPU:3"), are_named=True), 4),
        (ONE, PlanDevices(("CPU:0", "CPU:1"), are_named=True), None),  # of all cores, as it was measured
        (Layout(1, 4, 4, num_workers=2, across_workers=True), PlanDevices(("CPU:0", "CPU:1")), 2),
        (Layout(2, num_workers=2), PlanDevices(("CPU:0",)), None),  # one device of each worker, which is there anyway
        (TWO, PlanDevices(("GPU:0", "GPU:1")), None),
    ],
    ids=str,
)
def test_a_run_makes_the_logical_cpus_that_the_plan_used(
    layout: Layout, devices: PlanDevices, number: int | None, tmp_path: Path
) -> None:
    plan = plan_of(layout, devices)
    words = shlex.split(train_command(plan, None, []))
    assert [word for word in words if "num_logical_cpus" in word] == (
        [] if number is None else [f"strategy.num_logical_cpus={number}"]
    )
    write(config.Run(), plan, tmp_path / "plan.toml")
    strategy = config.load(tmp_path / "plan.toml", []).strategy
    assert getattr(strategy, "num_logical_cpus", 1) == (number or 1)


@pytest.mark.parametrize(
    ("layout", "devices", "named"),
    [
        (TWO, PlanDevices(("GPU:0", "GPU:1")), None),
        (TWO, PlanDevices(("GPU:0", "GPU:1", "GPU:2", "GPU:3")), ["GPU:0", "GPU:1"]),
        (TWO, PlanDevices(("GPU:2", "GPU:3"), are_named=True), ["GPU:2", "GPU:3"]),
        (Layout(1, 2, 4), PlanDevices(("GPU:0", "GPU:1", "GPU:2")), None),  # as many as it has stages
    ],
    ids=str,
)
def test_devices_are_named_where_a_strategy_would_take_others(
    layout: Layout, devices: PlanDevices, named: list[str] | None
) -> None:
    assert devices.settings_of(layout).get("devices") == named


def test_the_command_of_a_written_file_starts_the_workers_that_its_layout_has(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    one = write(config.Run(), plan_of(ONE), path)
    assert shlex.split(one) == ["python", "-m", "tfpar.train", "--config", str(path)]
    two = write(config.Run(), plan_of(Layout(2, num_workers=2)), path)
    assert shlex.split(two)[:3] == ["python", "-m", "tfpar.launch"]
    assert two in path.read_text()
