"""A listing of the code of tfpar and of a program, to compare between workers."""

from __future__ import annotations

import hashlib
from pathlib import Path


def code_listing(*programs: Path) -> str:
    """Return a line with name and digest for each file of tfpar, then for each program.

    Workers whose code differs could train different weights without an error.

    Example:
        >>> code_listing().splitlines()[0].split()[0]
        '__init__.py'
    """
    files = [*sorted(Path(__file__).parents[1].rglob("*.py")), *programs]
    return "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}\n" for file in files)
