"""XLA's persistent compilation cache in the run directory, so that a restart does not compile again.

TensorFlow 2.21 caches compiled functions in the folder `--tf_xla_persistent_cache_directory`, by name and operations
(tensorflow/compiler/jit/flags.h). It checks neither the processor nor the TensorFlow version, so each kind of machine
gets its own folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib import metadata
from pathlib import Path

_VARIABLE = "TF_XLA_FLAGS"
_FLAG = "--tf_xla_persistent_cache_directory"
_PROCESSOR_LINES = ("model name", "flags", "CPU part", "Features")  # in /proc/cpuinfo; the last two on ARM


def keep_in(folder: Path, root: Path = Path("/")) -> None:
    """Set XLA's cache folder, unless the user has set one. Call it before TensorFlow starts.

    Args:
        folder: The cache folder, which TensorFlow creates at the first compilation.
        root: The root of the file system that describes the machine.
    """
    flags = os.environ.get(_VARIABLE, "")
    if _FLAG not in flags:
        path = str(folder.absolute() / _kind_of_machine(root)).replace("\\", "\\\\").replace('"', '\\"')
        os.environ[_VARIABLE] = f'{flags} {_FLAG}="{path}"'.strip()


def _kind_of_machine(root: Path) -> str:
    """Return a hash of the processor, the GPUs with their driver, and the version of TensorFlow."""
    processor = {line for line in _text(root / "proc/cpuinfo").splitlines() if line.startswith(_PROCESSOR_LINES)}
    driver = root / "proc/driver/nvidia"
    cards = [line for card in driver.glob("gpus/*/information") for line in _text(card).splitlines() if "Model" in line]
    described = [*sorted(processor), *sorted(cards), _text(driver / "version"), _version()]
    return hashlib.blake2b("\n".join(described).encode(), digest_size=6).hexdigest()


def _version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):  # another distribution, such as tensorflow-cpu
        return metadata.version("tensorflow")
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
