"""A line of progress on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a line on standard error during this context, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    line = text[:79]
    print(line, end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        print(f"\r{' ' * len(line)}\r", end="", flush=True, file=sys.stderr)
