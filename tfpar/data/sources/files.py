"""The files of a split: a sub-folder, one file, the beginning of file names, or a pattern."""

import os
import re
from pathlib import Path

from tfpar import config
from tfpar.messages import received

# Not tuned, because the order of the examples must be the same on every machine.
FILES_AT_ONCE = 16
EXAMPLES_IN_A_ROW = 16


def split_files(settings: config.Data, split: str, kind: str) -> list[Path]:
    """List the files of a split, sorted by name, without hidden ones (`.x`, `_x`).

    Args:
        settings: Uses `directory`.
        split: A sub-folder of the directory, the beginning of file names in it, a pattern with `*`, `?` or `[`, or "."
            for the directory itself.
        kind: Kind of the files for messages, such as "TFRecord".

    Raises:
        FileNotFoundError: If there is no such folder, or no file of the split.

    >>> split_files(config.Data(source="table", directory="/no/where"), "train", "table")
    Traceback (most recent call last):
    FileNotFoundError: data.directory must be a folder of table files, but /no/where is not a folder: correct the path.
    """
    folder = directory(settings, f"{kind} files")
    if any(character in split for character in "*?["):
        if os.path.isabs(split):
            raise ValueError(
                f"A pattern of files must be relative to {folder}, received the absolute path {received.toml(split)}: "
                "remove the folder from it."
            )
        candidates = sorted(path for path in folder.glob(split) if not _is_hidden(path))
    elif os.path.isdir(folder / split):
        candidates = _visible(folder / split)
    else:
        candidates = [path for path in _visible(folder) if _is_of(path, split)]
    files = [path for path in candidates if path.is_file()]
    if not files:
        raise FileNotFoundError(
            f"{received.path(folder, received.COLUMNS)} holds no {kind} files of split {received.toml(split)}. A split "
            "is a sub-folder, the beginning of file names or a pattern; there are: "
            f"{received.excerpt(', '.join(_splits(folder)) or 'no files at all')}."
        )
    return files


def directory(settings: config.Data, content: str) -> Path:
    """Return the folder `data.directory`.

    Args:
        settings: Uses `directory`.
        content: Expected content for messages, such as "images".

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    folder = Path(os.path.expanduser(settings.directory or ""))
    # Unlike pathlib, os.path does not raise for a name that is too long.
    if not settings.directory or not os.path.isdir(folder):
        is_file = os.path.isfile(folder)
        raise FileNotFoundError(
            f"data.directory must be a folder of {content}, but {received.path(settings.directory or 'none')} "
            + ("is a file: set the folder that holds it." if is_file else "is not a folder: correct the path.")
        )
    return folder


def _is_hidden(path: Path) -> bool:
    return path.name.startswith((".", "_"))


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not _is_hidden(path))


def _is_of(path: Path, split: str) -> bool:
    """Return whether a file name begins with the split as a whole word: `train-0.tfrecord`, not `training.txt`."""
    return path.name.startswith(split) and not path.name[len(split) : len(split) + 1].isalpha()


def _splits(folder: Path) -> list[str]:
    names = {re.split(r"[^A-Za-z]", path.name)[0] if path.is_file() else path.name for path in _visible(folder)}
    return sorted(name for name in names if name)
