"""The memory of this process, from Linux."""

from __future__ import annotations

import resource
from pathlib import Path

_CLEAR_REFERENCES, _STATM = Path("/proc/self/clear_refs"), Path("/proc/self/statm")


def reset_peak() -> None:
    """Set the peak to the present memory, proc(5)."""
    _CLEAR_REFERENCES.write_text("5")


def resident_bytes() -> int:
    """Return the present memory."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Return the most memory since the last reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux tells kilobytes
