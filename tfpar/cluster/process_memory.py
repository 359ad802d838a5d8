"""The resident memory of this process in bytes. Outside Linux, every function returns the peak."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_CLEAR_REFERENCES, _STATM = Path("/proc/self/clear_refs"), Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


def reset_peak() -> None:
    """Reset the peak to the current memory (proc(5)).

    Raises:
        OSError: If the system forbids it, as some containers do.
    """
    _CLEAR_REFERENCES.write_text("5")


def resident_bytes() -> int:
    """Return the current resident memory.

    Example:
        >>> resident_bytes() > 1e6
        True
    """
    if not _STATM.exists():
        return _largest_bytes()
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Return the peak resident memory since the last reset.

    Unlike `getrusage`, it does not include the peak of the parent process.

    Example:
        >>> peak_bytes() >= resident_bytes() // 2
        True
    """
    if not _STATUS.exists():
        return _largest_bytes()
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    assert match is not None, "Linux has it since 2.6"
    return int(match[1]) * 1024


def _largest_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
