"""Files with one JSON object per epoch and line, of which damaged lines are skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpar.files import atomic_file

_MAX_BYTES = 256 << 20  # a million epochs


def write(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write a file of entries atomically.

    Raises:
        OSError: If it cannot be written.
    """
    atomic_file.write(path, text(entries))


def text(entries: Sequence[dict[str, Any]]) -> str:
    """Return the text of a file of entries."""
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the entries of a file, each with an `epoch` from 1, and the numbers of its damaged lines, from 1.

    A file that is missing or not a regular file has no entries and one damaged line.
    """
    try:
        lines = atomic_file.read(path, _MAX_BYTES).split(b"\n")
    except OSError:
        return [], [1]
    read_lines = [_entry(line) for line in (lines[:-1] if lines[-1] == b"" else lines)]
    entries = [entry for entry in read_lines if entry is not None]
    return entries, [number for number, entry in enumerate(read_lines, start=1) if entry is None]


def read_or_warn(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file; warn on standard error about damaged lines."""
    entries, damaged = read(path)
    if damaged and path.exists():
        others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        print(f"warning: {path} is damaged in line {damaged[0]}{others}.", file=sys.stderr)
    return entries


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    epoch = entry.get("epoch")
    return entry if isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 1 else None
