"""Files with one JSON value, read leniently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfpar.files import atomic_file

_MAX_BYTES = 16 << 20


def read_text(path: Path) -> str | None:
    """Return the text of a file that contains JSON; None if it is missing or cannot be read."""
    try:
        text = atomic_file.read(path, _MAX_BYTES).decode()
        json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return text


def read_table(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing or cannot be read."""
    table = json.loads(read_text(path) or "null")
    return table if isinstance(table, dict) else None
