"""The machine and the versions that a figure belongs to."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import tfpar

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str | int | float]:
    """Return the conditions of a measurement: processor, cores, load before the start, versions.

    The load shows other work on the machine: a figure measured with a load of 1 on two cores is unreliable.

    Returns:
        Names and values; versions are those of the installed packages.

    Example:
        >>> describe_machine()["cores"] >= 1
        True
    """
    gpus = _gpus()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_of_the_last_minute": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tensorflow": metadata.version("tensorflow"),
        "keras": metadata.version("keras"),
        "tfpar": tfpar.__version__,
        **({"gpus": gpus} if gpus else {}),
    }


def _processor() -> str:
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    """Return names and drivers of the GPUs of the machine; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return "; ".join(line.strip() for line in done.stdout.splitlines()) if done.returncode == 0 else ""
