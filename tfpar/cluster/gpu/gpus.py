"""The GPUs visible to a process, listed without TensorFlow, which would allocate memory on each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpar.messages.received import excerpt, quoted

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"  # the order of nvidia-smi; by default, CUDA puts the fastest first
ROOT = Path("/")
# Without the driver's persistence mode, nvidia-smi first starts each GPU, which takes a second or two.
TIME_LIMIT_SECONDS = 30.0
_QUERY = ("--query-gpu=index,uuid,memory.used,memory.total", "--format=csv")
_ROW = re.compile(r"([0-9]{1,4}), (GPU-[0-9a-fA-F-]{1,64}), ([^,]*), ([^,]*)")
_NAME = re.compile(r"[0-9]{1,4}|GPU-[0-9a-fA-F-]{1,64}|MIG-[0-9a-zA-Z/-]{1,128}")
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: Its name in CUDA_VISIBLE_DEVICES: a number, or a UUID that begins with `GPU-` or `MIG-`.
        uuid: Its UUID, if known.
        used_mib: Memory used by all processes in MiB, if known.
        total_mib: Total memory in MiB, if known.
    """

    name: str
    uuid: str | None = None
    used_mib: int | None = None
    total_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class VisibleGpus:
    """The GPUs visible to a process.

    Attributes:
        gpus: The GPUs, in the order of CUDA_VISIBLE_DEVICES if it is set.
        is_users: Whether CUDA_VISIBLE_DEVICES selects them.
        problem: Why nvidia-smi failed, as a clause; empty if it succeeded or is not installed.
    """

    gpus: tuple[Gpu, ...]
    is_users: bool = False
    problem: str = ""


def find(environment: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs listed by CUDA_VISIBLE_DEVICES, or by nvidia-smi, or by the driver.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If CUDA_VISIBLE_DEVICES is invalid, or lists a GPU that does not exist.

    Example:
        >>> find({"CUDA_VISIBLE_DEVICES": "-1"})  # hides all GPUs
        VisibleGpus(gpus=(), is_users=True, problem='')
    """
    named = named_in(environment)
    if named == ():
        return VisibleGpus((), is_users=True)
    rows, problem = _query_nvidia_smi(environment)
    if named is not None and not rows and not _has_driver(ROOT):
        return VisibleGpus(())  # the variable is set on a machine without GPUs
    if named is not None:
        return VisibleGpus(_with_facts(named, rows, environment), True, problem)
    return VisibleGpus(_driver_gpus(ROOT) if rows is None else rows, False, problem)


def named_in(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names in CUDA_VISIBLE_DEVICES; None if it is not set.

    As in CUDA, a negative number or an empty entry ends the list. Slurm sets "NoDevFiles" for no GPU.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If an entry is neither a number nor a UUID, or is repeated.

    Example:
        >>> named_in({"CUDA_VISIBLE_DEVICES": "2,GPU-8f3c1a2e,-1,3"})
        ('2', 'GPU-8f3c1a2e')
    """
    text = environment.get(VARIABLE)
    if text is None or text.strip() == "NoDevFiles":
        return None if text is None else ()
    names: dict[str, None] = {}  # an ordered set
    for name in (entry.strip() for entry in text.split(",")):
        if name == "" or re.fullmatch("-[0-9]+", name):
            break
        if not _NAME.fullmatch(name) or name in names:
            raise ValueError(
                f"{VARIABLE} must list different GPUs by number, or by UUID as nvidia-smi -L prints it, received "
                f"{quoted(text)}. Correct it, or unset it to use all GPUs."
            )
        names[name] = None
    return tuple(names)


def parse(text: str) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi; other lines are skipped.

    Args:
        text: The output of `nvidia-smi --query-gpu=index,uuid,memory.used,memory.total --format=csv`.

    Example:
        >>> parse("0, GPU-8f3c1a2e-0000, 512 MiB, 81559 MiB")
        (Gpu(name='0', uuid='GPU-8f3c1a2e-0000', used_mib=512, total_mib=81559),)
    """
    rows = (match for line in text.splitlines() if (match := _ROW.fullmatch(line.strip())))
    return tuple(
        Gpu(index, uuid, _mib(used), _mib(total)) for index, uuid, used, total in (row.groups() for row in rows)
    )


def identities(environment: Mapping[str, str]) -> list[str]:
    """Return an identifier for each visible GPU, unique across machines.

    Args:
        environment: Environment variables, such as `os.environ`.

    Returns:
        UUIDs in CUDA's order, or host name and number where the UUID is unknown. Empty if CUDA_VISIBLE_DEVICES is
        invalid.
    """
    with contextlib.suppress(ValueError):
        return [gpu.uuid or f"{os.uname().nodename}/{gpu.name}" for gpu in find(environment).gpus]
    return []


def _query_nvidia_smi(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | None, str]:
    """Return the GPUs listed by nvidia-smi, or None and why it failed (empty if it is not installed)."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return None, ""
    try:
        process = subprocess.Popen(
            [program, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return None, f"nvidia-smi cannot be started ({error.strerror})"
    try:
        text = process.communicate(timeout=TIME_LIMIT_SECONDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        # A process that hangs in a broken driver survives SIGKILL: do not wait for it.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout is not None:
            process.stdout.close()
        return None, f"nvidia-smi did not answer within {TIME_LIMIT_SECONDS:g} s"
    if process.returncode:
        line = text.partition("\n")[0].strip()
        return None, f"nvidia-smi failed ({excerpt(line) or f'exit code {process.returncode}'})"
    return parse(text), ""


def _with_facts(names: Sequence[str], rows: Sequence[Gpu] | None, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the named GPUs, with their facts from nvidia-smi."""
    if not rows:
        return tuple(Gpu(name) for name in names)
    if wrong := [name for name in names if name.isdigit() and int(name) >= len(rows)]:
        raise ValueError(
            f"{VARIABLE} must name GPUs of this machine, received {quoted(environment[VARIABLE])}: nvidia-smi lists "
            f"{len(rows)}, numbered from 0, and no GPU {wrong[0]}. Correct it, or unset it to use all GPUs."
        )
    # CUDA numbers the fastest first: if the GPUs differ, its order is not that of nvidia-smi.
    is_same_order = environment.get(ORDER) == BY_BUS or len({row.total_mib for row in rows}) == 1
    return tuple(_gpu_with_facts(name, rows, is_same_order) for name in names)


def _gpu_with_facts(name: str, rows: Sequence[Gpu], is_same_order: bool) -> Gpu:
    if name.isdigit():
        gpu = rows[int(name)] if is_same_order else None
    else:  # CUDA accepts a prefix of a UUID
        gpu = next((row for row in rows if (row.uuid or "").startswith(name)), None)
    return Gpu(name) if gpu is None else dataclasses.replace(gpu, name=name)


def _has_driver(root: Path) -> bool:
    """Return whether NVIDIA's driver has devices here, on Linux or in WSL."""
    return any((root / name).exists() for name in ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg"))


def _driver_gpus(root: Path) -> tuple[Gpu, ...]:
    """Return the GPUs in the driver's folder, which has an entry per GPU, named by PCI bus."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    return tuple(Gpu(str(index), _uuid(folder)) for index, folder in enumerate(folders))


def _uuid(folder: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if match := _UUID.search((folder / "information").read_text()):
            return match[1]
    return None


def _mib(text: str) -> int | None:
    """Return the number of "512 MiB"; None for words such as "[N/A]"."""
    match = re.fullmatch("([0-9]{1,9}) MiB", text.strip())
    return int(match[1]) if match else None
