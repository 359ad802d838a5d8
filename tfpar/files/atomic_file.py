"""Atomic writes of files, and reads of regular files only.

    .config.toml.3f9c21ab.unfinished   new, written, flushed to the disk ──rename──> config.toml

The unfinished file is always a new one: an existing file, link or pipe of that name is neither followed nor changed. A
link in place of the file itself is replaced, and its target is kept.
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
        content: Text is encoded as UTF-8.

    Raises:
        OSError: If it cannot be written; it names the file, and an existing file is kept.

    Example:
        >>> write(Path("config.toml"), "seed = 0")
    """
    with new(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file, which is renamed to `path` at the end of the block, or removed after an error.

    Args:
        path: The file, in an existing folder; an existing file is replaced.

    Raises:
        OSError: If it cannot be written; it names the file.
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
    """Return a new path for functions that write to a path; it is renamed to `path` as by `new`.

    Args:
        path: The file, in an existing folder; an existing file is replaced.

    Raises:
        OSError: If it cannot be written; it names the file.
    """
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
    """Return the unfinished path of a file; remove its remains, and let errors name the file itself."""
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
    """Flush a folder, so that the new name survives a loss of power, where the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_unfinished(name: str, of: str = "") -> bool:
    """Return whether a name is that of an unfinished file, left by a crash.

    Args:
        name: The name.
        of: The beginning of the name of the file itself.

    >>> is_unfinished(".config.toml.3f9c21ab.unfinished", "config"), is_unfinished("config.unfinished")
    (True, False)
    """
    return _UNFINISHED.fullmatch(name) is not None and name.startswith(f".{of}")


def remove_unfinished(folder: Path, of: str) -> None:
    """Remove unfinished files left by a crash; no other process may be writing files of that name.

    Args:
        folder: The folder.
        of: The beginning of the names of the files themselves.

    Raises:
        OSError: If it cannot be removed.
    """
    for path in folder.iterdir():
        if is_unfinished(path.name, of):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file; refuse pipes and devices, which may block or never end.

    Args:
        path: The file; a link to one is followed.
        most_bytes: A larger file is refused.

    Raises:
        FileNotFoundError: If there is none.
        OSError: If it is no regular file, too large, or cannot be read; it names the file.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"Larger than {most_bytes:,} bytes", str(path))
    return content


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading, as `read` does.

    Raises:
        OSError: As of `read`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
