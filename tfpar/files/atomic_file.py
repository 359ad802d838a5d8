"""Files that are written atomically, and reads of regular files only.

    .config.toml.3f9c21ab.unfinished   created, written, flushed to disk ──rename──> config.toml

The unfinished file is always new: an existing file, link or pipe of that name is never opened. If the file itself is a
link, the link is replaced and its target stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.unfinished")


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically.

    Args:
        path: The file, in an existing folder; an existing file is replaced.
        content: Bytes, or text to encode as UTF-8.

    Raises:
        OSError: If it cannot be written; an existing file is kept. The error names the file.

    Example:
        >>> write(Path("config.toml"), "seed = 0")
    """
    with new(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing. It is renamed to `path` at the end of the block, or removed after an error.

    Args:
        path: The file, in an existing folder; an existing file is replaced.

    Raises:
        OSError: If it cannot be written. The error names the file.
    """
    with _in_place(path) as unfinished:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(unfinished, flags, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _flush_folder(path.parent)


@contextlib.contextmanager
def new_by_path(path: Path) -> Iterator[Path]:
    """Return a new path, for functions that take a path; otherwise the same as `new`."""
    with _in_place(path) as unfinished:
        unfinished.mkdir(mode=0o700)  # so that no other user can create a link in it
        inside = unfinished / path.name
        yield inside
        with inside.open("rb") as file:
            os.fsync(file.fileno())
        inside.replace(path)
        _flush_folder(path.parent)


@contextlib.contextmanager
def _in_place(path: Path) -> Iterator[Path]:
    """Return the path of the unfinished file; remove what is left there, and name the file itself in errors."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(unfinished)


def _flush_folder(folder: Path) -> None:
    """Flush a folder, if the system supports it, so that a new name in it survives a power failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_unfinished(name: str, prefix: str = "") -> bool:
    """Return whether a name is that of the unfinished file of a file whose name begins with `prefix`.

    >>> is_unfinished(".config.toml.3f9c21ab.unfinished", "config"), is_unfinished("config.unfinished")
    (True, False)
    """
    return _UNFINISHED.fullmatch(name) is not None and name.startswith(f".{prefix}")


def remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove what a crash has left of files whose names begin with `prefix`; no process may be writing these files.

    Raises:
        OSError: If it cannot be removed.
    """
    for path in folder.iterdir():
        if is_unfinished(path.name, prefix):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file, following links; pipes and devices might block or never end.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If it is not a regular file, is larger than `max_bytes`, or cannot be read. The error names the file.
    """
    with opened(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"Larger than {max_bytes:,} bytes", str(path))
    return content


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading, with the errors of `read`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
