"""What a planner is doing, on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a line on the terminal of standard error during this context; nothing where it is a file.

    Args:
        text: The line.
    """
    if not sys.stderr.isatty():
        yield
        return
    line = text[:79]
    print(line, end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        print(f"\r{' ' * len(line)}\r", end="", flush=True, file=sys.stderr)
