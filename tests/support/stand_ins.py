"""Programs that answer in place of those of a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

HEADER = "index, uuid, memory.used [MiB], memory.total [MiB]"


def table(num_gpus: int, used_mib: int = 5) -> str:
    """The answer of nvidia-smi on a machine with equal GPUs."""
    rows = [f"{index}, {uuid(index)}, {used_mib} MiB, 81559 MiB" for index in range(num_gpus)]
    return "\n".join([HEADER, *rows, ""])


def uuid(index: int) -> str:
    """The UUID of a GPU of `table`."""
    return f"GPU-{index:08x}-93f1-4c1b-8a3d-000000000000"


def nvidia_smi(folder: Path, answer: str, code: int = 0, before: str = "") -> str:
    """Write a program `nvidia-smi` into a folder; return the folder for PATH.

    Args:
        folder: An existing folder.
        answer: What the program prints.
        code: Its exit code.
        before: A line of shell that it runs first.
    """
    (folder / "answer").write_text(answer)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{before}\n/bin/cat {folder / 'answer'}\nexit {code}\n")
    program.chmod(0o755)
    return str(folder)
