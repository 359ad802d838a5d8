"""Packages of the peers, each in a folder of the benchmark's own: they never enter the environment of tfpar.

The folder is that of the variable TFPAR_BENCHMARK_PEERS, by default `~/.cache/tfpar-benchmarks`. What is missing is
installed with pip when an experiment needs it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# tf_keras shall run on the TensorFlow that is installed, so pip must not bring another one.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torch": ("torch==2.13.0",),
    "tf_keras": ("--no-deps", "tf_keras~=2.21"),
}


def root() -> Path:
    """Return the folder of all that the benchmarks keep outside of this one."""
    return Path(os.environ.get("TFPAR_BENCHMARK_PEERS") or "~/.cache/tfpar-benchmarks").expanduser().absolute()


def folder(peer: str) -> Path:
    """Return the folder of a peer's packages."""
    return root() / f"{peer}-python{sys.version_info.major}.{sys.version_info.minor}"


def install(peer: str) -> None:
    """Install a peer if it is not there yet; all of it or nothing.

    Args:
        peer: A name in `REQUIREMENTS`.

    Raises:
        OSError: If pip fails; the message holds its last lines.
    """
    target = folder(peer)
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished), *REQUIREMENTS[peer]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last_lines = "\n".join(done.stderr.strip().splitlines()[-3:])
            raise OSError(f"pip cannot install {REQUIREMENTS[peer][-1]} into {target}: {last_lines}")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(peer: str, module: str | None = None) -> Any:
    """Import a module of an installed peer into this process.

    Args:
        peer: A name in `REQUIREMENTS`.
        module: The module's name; None for the peer's own.
    """
    if str(folder(peer)) not in sys.path:
        sys.path.insert(0, str(folder(peer)))
    return importlib.import_module(module or peer)
