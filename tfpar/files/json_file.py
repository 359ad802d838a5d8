"""Files that hold one JSON value, read leniently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfpar.files import atomic_file

_MOST_BYTES = 16 << 20


def read_text(path: Path) -> str | None:
    """Return a file that holds JSON; None if there is none, or it cannot be read."""
    try:
        text = atomic_file.read(path, _MOST_BYTES).decode()
        json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return text


def read_table(path: Path) -> dict[str, Any] | None:
    """Return the JSON table in a file; None if there is none, or it cannot be read."""
    table = json.loads(read_text(path) or "null")
    return table if isinstance(table, dict) else None
