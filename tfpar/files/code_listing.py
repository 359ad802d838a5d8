"""The code of tfpar and of a program as text that is equal where the code is."""

from __future__ import annotations

import hashlib
from pathlib import Path


def code_listing(*programs: Path) -> str:
    """Return the name and the digest of each file of tfpar, then of programs, a line each.

    Workers whose code differs can train to different weights without an error.

    Args:
        *programs: Files besides those of tfpar.

    Example:
        >>> code_listing().splitlines()[0].split()[0]
        '__init__.py'
    """
    files = [*sorted(Path(__file__).parents[1].rglob("*.py")), *programs]
    return "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}\n" for file in files)
