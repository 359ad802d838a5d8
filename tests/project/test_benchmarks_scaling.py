"""Scaling on paper: the tables of the documentation from the stored parts, and hand-made parts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all_reduce, process
from benchmarks.harness import run_rounds
from benchmarks.results import as_json
from benchmarks.scaling import layouts, parts
from benchmarks.scaling.layouts import Layout, as_markdown, experiment, measure, one_device_seconds
from benchmarks.scaling.parts import BETWEEN, BLOCK, INSIDE, SCALING_PARTS
from tests import ROOT

PART = {"forward_seconds": 1.0, "backward_seconds": 2.0, "update_seconds": 0.0, "cut_bytes": 10, "gradient_bytes": 100}


def stored(path: Path, block: dict[str, float], **link: float) -> str:
    """Write parts, and return the path."""
    outputs = {BLOCK: block, INSIDE: link, BETWEEN: link}
    result = run_rounds(SCALING_PARTS, 1, finished=[outputs])
    path.write_text(json.dumps({"machine": {}, "experiments": [as_json(result)]}))
    return str(path)


def test_the_tables_of_the_documentation_are_those_of_the_stored_parts() -> None:
    documented = (ROOT / "docs" / "scaling.md").read_text()
    for table in as_markdown(run_rounds(experiment(), 1)):
        assert table in documented, "run python -m benchmarks scaling"


def test_only_the_bubble_is_lost_where_links_cost_nothing(tmp_path: Path) -> None:
    path = stored(tmp_path / "parts.json", PART, latency_seconds=0.0, bytes_per_second=math.inf)
    assert one_device_seconds(8, parts.read(Path(path))) == 8 * 8 * 3.0
    for devices, stages in ((8, 1), (1024, 8), (64, 4)):
        weak, strong = (measure(Layout(devices, stages, is_weak, path)) for is_weak in (True, False))
        for output, microbatches in ((weak, 8 * stages), (strong, 1024 * stages // devices)):
            assert output["efficiency"] == pytest.approx(microbatches / (microbatches + stages - 1))
            assert output["efficiency"] == pytest.approx(1 - output["bubble_share"])
            assert output["efficiency_with_tree"] == output["efficiency"]


def test_a_tree_over_many_hosts_has_fewer_latencies(tmp_path: Path) -> None:
    path = stored(tmp_path / "parts.json", PART, latency_seconds=1.0, bytes_per_second=math.inf)
    output = measure(Layout(1024, 1, True, path))
    compute_seconds, inside_seconds = 8 * 8 * 3.0, 2.0  # owners inside a host
    assert output["step_seconds"] == pytest.approx(compute_seconds + inside_seconds + 2 * 255)
    assert output["efficiency_with_tree"] == pytest.approx(compute_seconds / (compute_seconds + inside_seconds + 2 * 8))


def test_a_file_without_parts_is_refused(tmp_path: Path) -> None:
    for text in ("{}", "no JSON", '{"experiments": [{"name": "other", "settings": {}}]}'):
        (tmp_path / "parts.json").write_text(text)
        with pytest.raises(ValueError, match="does not hold the results of scaling_parts"):
            parts.read(tmp_path / "parts.json")
    with pytest.raises(ValueError, match=r"scaling_parts --output .*missing\.json"):
        parts.read(tmp_path / "missing.json")


def test_a_link_is_fitted_to_the_slowest_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask_workers(module: str, setting: Any, num_workers: int, rate: str | None) -> list[dict[str, Any]]:
        asked.append((module, rate, num_workers))
        seconds = [2 * 0.5 + size / 1e6 for size in setting.sizes]  # two messages of half a second
        found = [{"seconds": one, "processor_seconds": 0.0} for one in seconds]
        return [{"found": found}, {"found": [{"seconds": 0.1, "processor_seconds": 0.0}] * len(found)}]

    monkeypatch.setattr(process, "ask_workers", ask_workers)
    output = parts.measure(SCALING_PARTS.settings[BETWEEN])
    assert output == pytest.approx({"latency_seconds": 0.5, "bytes_per_second": 1e6})
    assert asked == [("benchmarks.all_reduce_worker", "1gbit", 2)]
    assert "ring, pieces of 4 MB" in all_reduce.ALGORITHMS


def test_every_layout_fills_its_devices() -> None:
    for layout in experiment().settings.values():
        assert layout.num_replicas * layout.num_stages == layout.num_devices
        assert layout.num_microbatches % layout.num_replicas == 0
    assert max(layouts.NUMBERS_OF_DEVICES) == 1024
