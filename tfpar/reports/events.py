"""The events of a run, one JSON object per line: starts, interruptions, failures."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpar.files import atomic_file
from tfpar.messages.received import MAX_SENTENCE, excerpt

NAME = "events.jsonl"
STARTED, RESUMED, NONFINITE, STOPPED_EARLY = "started", "resumed", "nonfinite_loss", "stopped_early"
INTERRUPTED, FAILED, TRAINED = "interrupted", "failed", "trained"
_BEGINS, _ENDS = (STARTED, RESUMED), (INTERRUPTED, FAILED, TRAINED)
_MOST_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of a run.

    Args:
        time: Time in UTC, as ISO 8601 with seconds.
        kind: One of the constants of this module.
        step: Number of steps trained so far, if known.
        detail: A sentence, such as the error; may be empty.
    """

    time: str
    kind: str
    step: int | None = None
    detail: str = ""


def append(folder: Path, kind: str, step: int | None = None, detail: str = "") -> None:
    """Append an event to the file of a run.

    Write errors are ignored: no run fails because of its events. A line left unfinished by a crash is ended first.

    Args:
        folder: The run directory.
        kind: One of the constants of this module.
        step: Number of steps trained so far.
        detail: A sentence; a long one is shortened.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> append(folder, STARTED, step=0)
        >>> [event.kind for event in read(folder)[0]]
        ['started']
    """
    entry: dict[str, Any] = {"time": _now(), "event": kind, "step": step, "detail": excerpt(detail, MAX_SENTENCE)}
    line = json.dumps({key: value for key, value in entry.items() if value not in (None, "")}) + "\n"
    with contextlib.suppress(OSError):
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(folder / NAME, flags, 0o666), "r+b", buffering=0) as file:
            if (size := file.seek(0, os.SEEK_END)) and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = "\n" + line
            file.write(line.encode())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read(folder: Path) -> tuple[tuple[Event, ...], int]:
    """Return the events of a run, in order, and the number of damaged lines. A missing file counts as empty."""
    try:
        lines = atomic_file.read(folder / NAME, _MOST_BYTES).splitlines()
    except OSError:
        return (), 0
    parsed = [_event(line) for line in lines if line.strip()]
    events = tuple(event for event in parsed if event is not None)
    return events, len(parsed) - len(events)


def _event(line: bytes) -> Event | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("time", "event")):
        return None
    step, detail = entry.get("step"), entry.get("detail", "")
    return Event(entry["time"], entry["event"], step if type(step) is int else None, str(detail))


def status(events: Sequence[Event]) -> str:
    """Return how a run ended: the last end event, "not ended" if a start follows it, or "not known" without events.

    Example:
        >>> status([Event("", STARTED), Event("", INTERRUPTED)]), status([Event("", STARTED)]), status([])
        ('interrupted', 'not ended', 'not known')
    """
    last = next((event.kind for event in reversed(events) if event.kind in (*_BEGINS, *_ENDS)), None)
    return "not known" if last is None else last if last in _ENDS else "not ended"


def lost_ends(events: Sequence[Event]) -> list[Event]:
    """Return the starts without an end before the next start: the process was killed or crashed.

    Example:
        >>> [event.time for event in lost_ends([Event("1", STARTED), Event("2", RESUMED), Event("3", TRAINED)])]
        ['1']
    """
    process_events = [event for event in events if event.kind in (*_BEGINS, *_ENDS)]
    pairs = itertools.pairwise(process_events)
    return [event for event, following in pairs if event.kind in _BEGINS and following.kind in _BEGINS]
