"""Checks of this machine without TensorFlow: versions, the driver, memory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import tfpar
from tfpar.checks.check import Check
from tfpar.cluster import cores, gpus

_PACKAGES = ("tensorflow", "keras", "numpy")
_LEAST_FREE_BYTES = 2 << 30
_LEAST_SHARED_BYTES = 1 << 30  # NCCL takes some tens of MB for each GPU, and fails late; Docker gives 64 MB in all
_MOST_TAKEN = 0.1  # part of a GPU's memory that other programs may hold


def versions() -> Check:
    """Return the versions of tfpar, Python, TensorFlow, Keras and NumPy."""
    found = {"tfpar": tfpar.__version__, "Python": platform.python_version()}
    found |= {name: _installed(name) for name in _PACKAGES}
    found["system"] = f"{platform.system()} {platform.release()}"
    return Check("versions", "ok", ", ".join(f"{name} {one}" for name, one in found.items()), values=found)


def _installed(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"


def memory(root: Path = Path("/")) -> Check:
    """Return the free memory of this machine, and its cores.

    Args:
        root: The folder that holds `proc`.
    """
    values: dict[str, int] = {}
    with contextlib.suppress(OSError):
        rows = (root / "proc/meminfo").read_text()
        values = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", rows)}
    if "MemAvailable" not in values:
        return Check("memory", "skipped", "/proc/meminfo cannot be read")
    free, total = values["MemAvailable"], values["MemTotal"]
    return Check(
        "memory",
        "ok" if free >= _LEAST_FREE_BYTES else "slow",
        f"{_gigabytes(free)} of {_gigabytes(total)} free, {cores.num_allowed_cores()} cores",
        f"{_gigabytes(_LEAST_FREE_BYTES)} free",
        "" if free >= _LEAST_FREE_BYTES else "End other programs: each worker needs about 1 GB, and its data.",
        {"free_bytes": free, "total_bytes": total},
    )


def shared_memory(folder: Path = Path("/dev/shm"), *, is_needed: bool) -> Check:
    """Return the free space of `/dev/shm`, through which NCCL sends between GPUs of a machine.

    Args:
        folder: The folder of the shared memory.
        is_needed: Whether there are several GPUs.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(str(folder), "skipped", os.strerror(error.errno or 0))
    is_low = is_needed and free < _LEAST_SHARED_BYTES
    return Check(
        str(folder),
        "WRONG" if is_low else "ok",
        f"{_gigabytes(free)} free",
        f"{_gigabytes(_LEAST_SHARED_BYTES)} for several GPUs" if is_needed else "",
        "Start the container with --shm-size=8g, or --ipc=host." if is_low else "",
        {"free_bytes": free},
    )


def driver(environment: Mapping[str, str], root: Path = Path("/")) -> Check:
    """Return the version of NVIDIA's driver.

    Args:
        environment: The variables of this process.
        root: The folder that holds `proc`.
    """
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text()
        if found := re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text):
            return Check("driver", "ok", f"NVIDIA {found[1]}", values={"driver": found[1]})
    if shutil.which("nvidia-smi", path=environment.get("PATH")):
        return Check("driver", "ok", "nvidia-smi is installed; /proc/driver/nvidia is not visible here")
    return Check("driver", "skipped", "no NVIDIA driver on this machine: the checks run on CPUs")


def gpu_memory(found: gpus.Found) -> list[Check]:
    """Return for each GPU how much of its memory other programs hold; call it before TensorFlow starts.

    Args:
        found: The GPUs of `gpus.find`.
    """
    checks = []
    for number, gpu in enumerate(found.gpus):
        if gpu.used_mib is None or not gpu.total_mib:
            continue
        taken = gpu.used_mib / gpu.total_mib
        checks.append(
            Check(
                f"memory of GPU {number}",
                "ok" if taken <= _MOST_TAKEN else "slow",
                f"{gpu.total_mib - gpu.used_mib:,} of {gpu.total_mib:,} MiB free",
                f"{_MOST_TAKEN:.0%} taken by others",
                ""
                if taken <= _MOST_TAKEN
                else f"nvidia-smi lists the programs on it: end them, or leave this GPU out with {gpus.VARIABLE}.",
                {"used_mib": gpu.used_mib, "total_mib": gpu.total_mib},
            )
        )
    return checks


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
