"""A run as recorded in its folder. Missing and damaged files become notes, not errors."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.files import json_file, json_lines
from tfpar.messages import received
from tfpar.reports import events, timelines
from tfpar.reports.events import Event
from tfpar.reports.number_check import is_number
from tfpar.reports.timelines import PipelineRecord

RECORD = "record.json"
PROFILE = Path("tensorboard", "plugins", "profile")  # where TensorBoard's profiler looks
TRAINING = "training"
_RUN_FILES = ("run.json", "config.toml")


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in its folder. Tables and sequences are empty if their file is missing.

    Args:
        folder: The run directory.
        settings: The value of each setting, by key, such as "training.epochs".
        epochs: The lines of `metrics.jsonl`, one per epoch.
        results: The figures of `results.json`; empty until training has ended.
        events: Starts, interruptions and failures.
        status: "trained", "interrupted", "failed", "training", "not ended" or "not known".
        record: The content of `record.json`: versions, machine, model, layout, memory and times.
        pipeline: The step of a pipeline, as planned and as run.
        plan: The plan, if the planner wrote one.
        parity: The result of a parity check, if one was saved here.
        notes: Sentences about missing and damaged files.
    """

    folder: Path
    settings: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]]
    results: Mapping[str, Any]
    events: Sequence[Event]
    status: str
    record: Mapping[str, Any]
    pipeline: PipelineRecord | None = None
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name or str(self.folder)

    @property
    def figures(self) -> Mapping[str, Any]:
        """The results, or the figures of the last epoch until there are results."""
        return self.results or (self.epochs[-1] if self.epochs else {})

    @property
    def step_seconds(self) -> float | None:
        """The measured duration of a step, if any."""
        milliseconds = self.figures.get("step_milliseconds")
        return None if not is_number(milliseconds) or not milliseconds else milliseconds / 1e3

    @property
    def device_peaks(self) -> Mapping[str, float]:
        """The peak memory of each GPU in bytes, by name."""
        rows = self.rows("memory", "devices")
        return {str(row.get("device")): row["peak_bytes"] for row in rows if is_number(row.get("peak_bytes"))}

    @property
    def fullest_bytes(self) -> float | None:
        """The largest peak memory of a GPU in bytes; None without GPUs."""
        return max(self.device_peaks.values(), default=None)

    @property
    def process_bytes(self) -> Any:
        """The peak memory of the process in bytes, if recorded."""
        return self.table("memory").get("process_peak_bytes")

    @property
    def profile(self) -> Path | None:
        """The folder of TensorFlow's profiles, if it exists."""
        folder = self.folder / PROFILE
        return folder if folder.is_dir() else None

    def table(self, *keys: str) -> Mapping[str, Any]:
        """Return a table of the record, by the keys that lead to it; empty if it is missing."""
        value: Any = self.record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, Mapping) else {}

    def rows(self, *keys: str) -> list[Mapping[str, Any]]:
        """Return a list of tables of the record, by the keys that lead to it; empty if it is missing."""
        value = self.table(*keys[:-1]).get(keys[-1])
        return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def read(folder: str | Path, *, status: str | None = None) -> RecordedRun:
    r"""Read a run from its folder.

    Args:
        folder: The run directory.
        status: The status of the run. By default, it is derived from the files.

    Raises:
        ValueError: If the folder does not exist, or holds no run.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.toml").write_text("[training]\nepochs = 3")
        >>> run = read(folder)
        >>> run.settings["training.epochs"], run.status, run.notes
        (3, 'not known', ('No epoch is complete yet: there is no metrics.jsonl.',))
    """
    folder = Path(folder)
    _require_run(folder)
    notes: list[str] = []
    run_events, num_damaged = events.read(folder)
    if num_damaged:
        lines = "1 line" if num_damaged == 1 else f"{num_damaged} lines"
        notes.append(f"{lines} of {events.NAME} {'is' if num_damaged == 1 else 'are'} damaged and left out.")
    record = _table(folder / RECORD, notes)
    pipeline = record.get("pipeline")
    settings = _settings(folder / "config.toml", notes)
    epochs = _epochs(folder / "metrics.jsonl", notes)
    run = RecordedRun(
        folder=folder,
        settings=settings,
        epochs=epochs,
        results=_table(folder / "results.json", notes),
        events=run_events,
        status=status or "",
        record=record,
        pipeline=None if pipeline is None else timelines.from_table(pipeline),
        plan=_table(folder / "plan.json", notes),
        parity=_table(folder / "parity.json", notes),
    )
    return dataclasses.replace(run, status=status or _status(run), notes=tuple(notes))


def _require_run(folder: Path) -> None:
    shown = received.path(folder)
    try:
        if not folder.exists():
            raise ValueError(f"A run must be a folder, and {shown} does not exist. Name a folder under runs/.")
        if not folder.is_dir():
            raise ValueError(f"A run must be a folder, and {shown} is a file. Name its folder.")
        names = os.listdir(folder)
    except OSError as error:
        raise ValueError(f"{shown} cannot be read: {error.strerror}. Correct the path, or its permissions.") from None
    if not any(name in names for name in _RUN_FILES):
        raise ValueError(
            f"A run must be a folder with a config.toml, and {shown} holds none. Name a folder that "
            "python -m tfpar.train has written."
        )


def _table(path: Path, notes: list[str]) -> Mapping[str, Any]:
    table = json_file.read_table(path)
    if table is None and path.exists():
        notes.append(f"{path.name} is damaged, and left out.")
    return table or {}


def _settings(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return all settings with their defaults, or only those in the file if this version cannot load it."""
    try:
        return dict(_flat(config.load(path).model_dump()))
    except (OSError, ValueError) as error:
        reason = error
    try:
        settings = dict(_flat(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError):
        settings = {}
    notes.append(f"config.toml is not one of this version: {received.excerpt(str(reason), 160)}")
    return settings


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _epochs(path: Path, notes: list[str]) -> Sequence[Mapping[str, Any]]:
    if not path.exists():
        notes.append("No epoch is complete yet: there is no metrics.jsonl.")
        return ()
    entries, damaged = json_lines.read(path)
    if damaged:
        lines, lacking = ("Line", "it") if len(damaged) == 1 else ("Lines", "them")
        numbers = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        notes.append(f"{lines} {numbers} of metrics.jsonl cannot be read, and the report lacks {lacking}.")
    return tuple(entries)


def _status(run: RecordedRun) -> str:
    if is_locked(run.folder / ".lock"):
        return TRAINING
    status = events.status(run.events)
    return events.TRAINED if status in ("not known", "not ended") and run.results else status


def is_locked(path: Path) -> bool:
    """Return whether a local process holds the lock of a run directory.

    It does not try to take the lock: that could make a training that starts at this moment fail.

    Args:
        path: The file `.lock`.
    """
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(line.split()[1] == "FLOCK" and device in line.split() for line in locks.splitlines() if "->" not in line)
