"""Checks of this machine without TensorFlow: versions, driver, memory, and other users of the GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import tfpar
from tfpar.checks.report import Check
from tfpar.cluster import cores
from tfpar.cluster.gpu import gpus

_PACKAGES = ("tensorflow", "keras", "numpy")
_LEAST_FREE_BYTES = 2 << 30
_LEAST_SHARED_BYTES = 1 << 30  # NCCL takes tens of MB per GPU and fails late; Docker's default is 64 MB
_MOST_TAKEN = 0.1  # fraction of a GPU's memory that other programs may use


def versions() -> Check:
    """Return the versions of tfpar, Python, TensorFlow, Keras and NumPy."""
    values = {"tfpar": tfpar.__version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        values[package] = "not installed"
        with contextlib.suppress(metadata.PackageNotFoundError):
            values[package] = metadata.version(package)
    values["system"] = f"{platform.system()} {platform.release()}"
    return Check("versions", "ok", ", ".join(f"{name} {value}" for name, value in values.items()), values=values)


def driver(environment: Mapping[str, str], root: Path = Path("/")) -> Check:
    """Return the version of NVIDIA's driver."""
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text()
        if match := re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text):
            return Check("driver", "ok", f"NVIDIA {match[1]}", values={"driver": match[1]})
    if shutil.which("nvidia-smi", path=environment.get("PATH")):
        return Check("driver", "ok", "nvidia-smi is installed; /proc/driver/nvidia is not visible here")
    return Check("driver", "skipped", "no NVIDIA driver on this machine: the checks run on CPUs")


def memory(root: Path = Path("/")) -> Check:
    """Check the free memory of this machine."""
    try:
        rows = re.findall(r"(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text())
    except OSError:
        return Check("memory", "skipped", "/proc/meminfo cannot be read")
    num_bytes = {name: int(kib) << 10 for name, kib in rows}
    free, total = num_bytes["MemAvailable"], num_bytes["MemTotal"]
    figure = f"{_gigabytes(free)} of {_gigabytes(total)} free, {cores.num_allowed_cores()} cores"
    way_out = "" if free >= _LEAST_FREE_BYTES else "End other programs: each worker needs about 1 GB, and its data."
    values = {"free_bytes": free, "total_bytes": total}
    return Check(
        "memory", "slow" if way_out else "ok", figure, f"{_gigabytes(_LEAST_FREE_BYTES)} free", way_out, values
    )


def shared_memory(folder: Path = Path("/dev/shm"), *, is_needed: bool) -> Check:
    """Check the free space of `/dev/shm`, through which NCCL sends between local GPUs."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(str(folder), "skipped", os.strerror(error.errno or 0))
    bound = f"{_gigabytes(_LEAST_SHARED_BYTES)} for several GPUs" if is_needed else ""
    is_low = is_needed and free < _LEAST_SHARED_BYTES
    way_out = "Start the container with --shm-size=8g, or --ipc=host." if is_low else ""
    values = {"free_bytes": free}
    return Check(str(folder), "WRONG" if is_low else "ok", f"{_gigabytes(free)} free", bound, way_out, values)


def gpu_memory(available: gpus.VisibleGpus) -> Iterator[Check]:
    """Check how much memory of each GPU other programs use. Call it before TensorFlow starts."""
    for number, gpu in enumerate(available.gpus):
        if gpu.used_mib is None or not gpu.total_mib:
            continue
        is_taken = gpu.used_mib > _MOST_TAKEN * gpu.total_mib
        figure = f"{gpu.total_mib - gpu.used_mib:,} of {gpu.total_mib:,} MiB free"
        way_out = f"nvidia-smi lists the programs on it: end them, or leave this GPU out with {gpus.VARIABLE}."
        yield Check(
            f"memory of GPU {number}",
            "slow" if is_taken else "ok",
            figure,
            f"{_MOST_TAKEN:.0%} taken by others",
            way_out if is_taken else "",
            {"used_mib": gpu.used_mib, "total_mib": gpu.total_mib},
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
