"""Compilations of XLA in the folder of a run, so that a restart does not compile again; no TensorFlow.

TensorFlow 2.21 writes each compiled function into the folder of `--tf_xla_persistent_cache_directory`, and finds it
there by its name and operations (tensorflow/compiler/jit/flags.h). It does not ask for which processor it was compiled,
and by which version, so each kind of machine has a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib import metadata
from pathlib import Path

_VARIABLE = "TF_XLA_FLAGS"
_FLAG = "--tf_xla_persistent_cache_directory"
_OF_PROCESSOR = ("model name", "flags", "CPU part", "Features")  # in /proc/cpuinfo; the last two on ARM


def keep_in(folder: Path, root: Path = Path("/")) -> None:
    """Let TensorFlow, which has not started, keep compilations in a folder; a choice of the user has precedence.

    Args:
        folder: It need not exist; TensorFlow creates it for the first compilation.
        root: The root of the file system that describes the machine.
    """
    flags = os.environ.get(_VARIABLE, "")
    if _FLAG not in flags:
        path = str(folder.absolute() / _kind_of_machine(root)).replace("\\", "\\\\").replace('"', '\\"')
        os.environ[_VARIABLE] = f'{flags} {_FLAG}="{path}"'.strip()


def _kind_of_machine(root: Path) -> str:
    """Return a name of the processor, the GPUs with their driver, and the version of TensorFlow."""
    found = {line for line in _text(root / "proc/cpuinfo").splitlines() if line.startswith(_OF_PROCESSOR)}
    driver = root / "proc/driver/nvidia"
    cards = [line for card in driver.glob("gpus/*/information") for line in _text(card).splitlines() if "Model" in line]
    described = [*sorted(found), *sorted(cards), _text(driver / "version"), _version()]
    return hashlib.blake2b("\n".join(described).encode(), digest_size=6).hexdigest()


def _version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):  # another name, such as tensorflow-cpu
        return metadata.version("tensorflow")
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
