"""Run directories as the train command leaves them, made in milliseconds; and a strict reader of pages."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfpar import report
from tfpar.commands import command_line
from tfpar.pipeline.schedule import make
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.reports import events, timelines
from tfpar.reports.timelines import PipelineRecord

HOSTILE = "<script>alert('x')</script>\"&\x1b[31m$_"
_VOID = {"meta", "br"}


def epochs(number: int, scale: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, with falling losses."""
    return [
        {
            **{"epoch": epoch, "step": 24 * epoch, "loss": scale / epoch, "val_loss": 1.1 * scale / epoch},
            **{"examples_per_second": 6400.0, "step_milliseconds": 10.0, "data_wait_share": 0.2, **more},
        }
        for epoch in range(1, number + 1)
    ]


def pipeline(measured: bool = True) -> PipelineRecord:
    """Return the record of two uneven stages, one of which waits most of the time."""
    schedule = make("gpipe", num_stages=2, num_microbatches=4)
    durations = Durations((1e-3, 1e-3), (2e-3, 2e-3), (1e-3, 1e-3), (1e-3, 1e-3), transfer_seconds=(0.0,))
    planned = simulate(schedule, durations)
    return PipelineRecord(schedule, planned, planned if measured else None, durations)


def write(folder: Path, toml: str = "", lines: Iterable[dict[str, Any]] = (), **tables: dict[str, Any]) -> Path:
    """Write a run directory.

    Args:
        folder: The folder, which is created.
        toml: The configuration.
        lines: Those of `metrics.jsonl`.
        tables: The content of the JSON files, by their names without the ending.
    """
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(toml)
    (folder / "run.json").write_text('{"run": "x"}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events.append(folder, events.STARTED)
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    return folder


def record(**more: Any) -> dict[str, Any]:
    """Return what `record.json` holds, of a pipeline."""
    return {
        "versions": {"tfpar": "0.1.0"},
        "machine": {"host": HOSTILE, "devices": ["CPU:0", "CPU:1"]},
        "model": {
            **{"name": HOSTILE, "parameters": 1234, "precision": "float32"},
            "layers": [{"name": HOSTILE, "class": "Dense", "shape": "(None, 4)", "parameters": 20}],
        },
        "layout": {"strategy": "Pipeline on CPU:0, CPU:1", "batch": "64 examples", "stages": "stage <0>"},
        "pipeline": timelines.to_table(pipeline()),
        "memory": {"process_peak_bytes": 500_000_000, "devices": []},
        "seconds": {"fit": 10.0, "first_call": 1.0, "steps": 4.0, "data": 1.0, "validation": 3.0},
        "points": [{"step": 12, "examples_per_second": 6000.0, "data_wait_share": 0.1}],
        **more,
    }


def call_report(*arguments: str) -> int:
    """Run `python -m tfpar.report` in this process, and return its exit code."""
    report.COMMAND.values["output"].unparse()  # a value of an earlier call
    return report.main(command_line.parse(report.COMMAND, ["tfpar.report", *arguments]))


class Page(html.parser.HTMLParser):
    """A page, read strictly: every element is closed, no id occurs twice.

    Attributes:
        elements: Each start tag with its attributes.
        words: The text, without that of styles.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), ids

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} ends another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def assert_loads_nothing(self) -> None:
        """Assert that the page is one file, accessible, without scripts."""
        assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in self.elements}
        for tag, attributes in self.elements:
            assert not any(name.startswith("on") for name in attributes), tag
            for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                value = attributes.get(name)
                assert value is None or value.startswith("#") or (tag == "a" and ":" not in value), (tag, value)
        assert self.of("html")[0]["lang"] == "en"
        described = [each for _, each in self.elements if each.get("role") == "img" and each["aria-label"]]
        assert len(described) == len(self.of("svg"))
        assert all(head["scope"] in ("col", "row") for head in self.of("th"))
        targets = {attributes.get("id") for _, attributes in self.elements}
        links = {attributes.get(name) for _, attributes in self.elements for name in ("href", "xlink:href")} - {None}
        assert {link[1:] for link in links if link and link.startswith("#")} <= targets
