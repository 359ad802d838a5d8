"""The memory of this process; where the system is not Linux, its largest memory stands for all."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_CLEAR_REFERENCES, _STATM = Path("/proc/self/clear_refs"), Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


def reset_peak() -> None:
    """Set the peak to the present memory, proc(5).

    Raises:
        OSError: If the system does not allow it, as in some containers.
    """
    _CLEAR_REFERENCES.write_text("5")


def resident_bytes() -> int:
    """Return the present memory.

    Example:
        >>> resident_bytes() > 1e6
        True
    """
    if not _STATM.exists():
        return _largest_bytes()
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Return the most memory since the last reset.

    `getrusage` would include the peak of the process that started this one.

    Example:
        >>> peak_bytes() >= resident_bytes() // 2
        True
    """
    if not _STATUS.exists():
        return _largest_bytes()
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None, "Linux has it since 2.6"
    return int(found[1]) * 1024


def _largest_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
