"""The GPUs that a process may use, found without TensorFlow, which would take memory on each of them."""

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
BY_BUS = "PCI_BUS_ID"  # the order of nvidia-smi; CUDA's default is the fastest first
ROOT = Path("/")
# Without the persistence mode of the driver, nvidia-smi starts each GPU first, which takes a second or two.
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
        uuid: Its UUID, if it is known.
        used_mib: Memory in use by all processes, in MiB, if it is known.
        total_mib: All of its memory, in MiB, if it is known.
    """

    name: str
    uuid: str | None = None
    used_mib: int | None = None
    total_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The GPUs that a process may use.

    Attributes:
        gpus: The GPUs in the order of CUDA_VISIBLE_DEVICES, or else of their numbers.
        is_users: Whether the user's own CUDA_VISIBLE_DEVICES names them.
        problem: Why nvidia-smi gave no answer, as a clause; empty if it did, or is not installed.
    """

    gpus: tuple[Gpu, ...]
    is_users: bool = False
    problem: str = ""


def find(environment: Mapping[str, str]) -> Found:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, or else those of nvidia-smi, or else those of the driver.

    Args:
        environment: The variables of this process, as `os.environ`.

    Raises:
        ValueError: If CUDA_VISIBLE_DEVICES is invalid, or names a GPU that does not exist.

    Example:
        >>> find({"CUDA_VISIBLE_DEVICES": "-1"})  # hides all GPUs
        Found(gpus=(), is_users=True, problem='')
    """
    named = named_in(environment)
    if named == ():
        return Found((), is_users=True)
    rows, problem = _asked(environment)
    if named is not None and not rows and not _has_driver(ROOT):
        return Found(())  # the variable is set on a machine without GPUs
    if named is not None:
        return Found(_known(named, rows, environment), True, problem)
    return Found(_of_driver(ROOT) if rows is None else rows, False, problem)


def named_in(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names in CUDA_VISIBLE_DEVICES; None if it is not set.

    As in CUDA, a negative number or an empty entry ends the list. Slurm writes "NoDevFiles" for no GPU.

    Args:
        environment: The variables of this process.

    Raises:
        ValueError: If an entry is neither a number nor a UUID, or occurs twice.

    Example:
        >>> named_in({"CUDA_VISIBLE_DEVICES": "2,GPU-8f3c1a2e,-1,3"})
        ('2', 'GPU-8f3c1a2e')
    """
    text = environment.get(VARIABLE)
    if text is None or text.strip() == "NoDevFiles":
        return None if text is None else ()
    names: dict[str, None] = {}  # in their order
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
    """Return the GPUs of the output of nvidia-smi; lines of another form are skipped.

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
    """Return a text for each visible GPU that no other GPU of any machine has, as far as the UUIDs are known.

    Args:
        environment: The variables of this process.

    Returns:
        In the order of CUDA; the host's name and a number where the UUID is not known. Empty if CUDA_VISIBLE_DEVICES
        is invalid.
    """
    with contextlib.suppress(ValueError):
        return [gpu.uuid or f"{os.uname().nodename}/{gpu.name}" for gpu in find(environment).gpus]
    return []


def _asked(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | None, str]:
    """Return the answer of nvidia-smi, None without one, and the reason if it is installed."""
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
        # A process that waits within a broken driver does not even end by SIGKILL: it is not waited for.
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


def _known(names: Sequence[str], rows: Sequence[Gpu] | None, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return GPUs that the user has named, with what nvidia-smi says about each."""
    if not rows:
        return tuple(Gpu(name) for name in names)
    if wrong := [name for name in names if name.isdigit() and int(name) >= len(rows)]:
        raise ValueError(
            f"{VARIABLE} must name GPUs of this machine, received {quoted(environment[VARIABLE])}: nvidia-smi lists "
            f"{len(rows)}, numbered from 0, and no GPU {wrong[0]}. Correct it, or unset it to use all GPUs."
        )
    # CUDA numbers the fastest first, which is another order than that of nvidia-smi if the GPUs differ.
    is_same_order = environment.get(ORDER) == BY_BUS or len({row.total_mib for row in rows}) == 1
    return tuple(_one(name, rows, is_same_order) for name in names)


def _one(name: str, rows: Sequence[Gpu], is_same_order: bool) -> Gpu:
    if name.isdigit():
        found = rows[int(name)] if is_same_order else None
    else:  # CUDA accepts the beginning of a UUID
        found = next((row for row in rows if (row.uuid or "").startswith(name)), None)
    return Gpu(name) if found is None else dataclasses.replace(found, name=name)


def _has_driver(root: Path) -> bool:
    """Return whether NVIDIA's driver has devices here: on Linux, or within Windows."""
    return any((root / name).exists() for name in ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg"))


def _of_driver(root: Path) -> tuple[Gpu, ...]:
    """Return the GPUs in the driver's folder, which has one entry for each, named by its PCI bus."""
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
