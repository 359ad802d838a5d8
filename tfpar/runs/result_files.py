"""The files that a run writes into its directory, and a check that results are unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tfpar.files import atomic_file, json_lines

FILES = (
    *(".lock", "run.json", "config.toml", "metrics.jsonl", "model.keras", "results.json", "optimizer.json"),
    *("pipeline.png", "tensorflow.log", "evaluations.jsonl", "record.json", "events.jsonl", "report.html"),
    *("plan.json", "best.keras"),
)
FOLDERS = ("checkpoints", "tensorboard", "report", "xla")
# The files that a run creates before its first step.
_CREATED_BY_CLAIM = frozenset(
    {
        *(".lock", "run.json", "config.toml", "optimizer.json", "tensorflow.log", "checkpoints"),
        *("record.json", "events.jsonl", "plan.json"),
    }
)
# The files that an interrupted start can leave.
_LEFTOVERS = frozenset({".lock", "run.json", "config.unfinished", "tensorflow.log"})


def is_unused(names: Iterable[str]) -> bool:
    """Return whether a folder with these files can become a run directory: it holds neither a run nor user files."""
    return all(name in _LEFTOVERS or atomic_file.is_unfinished(name) for name in names)


def remove_claim(folder: Path, before: Collection[str] | None) -> None:
    """Remove the files of a run that has not trained a step.

    Args:
        folder: The run directory, which may be gone.
        before: The names of the files in it before the run; None if the run created the folder.
    """
    with contextlib.suppress(OSError):  # the next run takes over files that cannot be removed
        created = set(os.listdir(folder)).difference(before or ())
        if created <= _CREATED_BY_CLAIM and not any((folder / "checkpoints").glob("*")):
            for name in created:
                path = folder / name
                path.rmdir() if path.is_dir() else path.unlink()
            if before is None:
                folder.rmdir()


def require_kinds(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which the name of a run's file or subfolder belongs to something else, such as a link.

    Raises:
        ValueError: If there is such a name.
    """
    for name in names:
        path = folder / name
        if name in FILES and not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{path} must be a file, and is not. Remove it, or choose another --directory.")
        if name in FOLDERS and not path.is_dir():  # may be a link to another disk
            raise ValueError(f"{path} must be a folder, and is not. Remove it, or choose another --directory.")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    total = hashlib.sha256()
    with atomic_file.opened(path) as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def is_unchanged(path: Path, digests: Mapping[str, Any] | None) -> bool:
    """Return whether a file still has its recorded digest.

    Args:
        path: The file.
        digests: The digests by file name. None for runs of older versions, for which the file must be undamaged.
    """
    try:
        if digests is not None:
            return digest(path) == digests.get(path.name)
        if path.suffix == ".keras":
            with atomic_file.opened(path) as file, zipfile.ZipFile(file) as archive:
                return archive.testzip() is None
    except Exception:  # zipfile raises a dozen kinds
        return False
    entries, damaged = json_lines.read(path)
    return bool(entries) and not damaged


def are_results(results: Mapping[str, Any]) -> bool:
    """Return whether a table holds the results of a run: numbers or lists of numbers, by name."""
    counts = [results.get(name) for name in ("epochs", "steps")]
    return all(isinstance(count, int) for count in counts) and all(map(_is_figure, results.values()))


def _is_figure(value: Any) -> bool:
    return all(map(_is_figure, value)) if isinstance(value, list) else isinstance(value, int | float)
