"""The file format of checkpoints: an uncompressed .npz file, written atomically, with a checksum for each array.

    .step-00000240.npz.3f9c21ab.unfinished   written, flushed to disk ──rename──> step-00000240.npz

It may name part files, `step-00000240.3f9c21ab.1-of-2.part`, with the arrays of other processes. They are complete
before it is, and are removed with it (`part_files`). Writing 100 MB takes about 100 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfpar.files import atomic_file

STATE = "state.json"
PART_FILES = "part_files"  # in the JSON of the file
# Also matches the names under which TensorFlow writes a part file.
_PART_NAME = re.compile(r"step-[0-9]+\.[0-9a-f]{8}\.[0-9]+-of-[0-9]+\..+")
_NAME = re.compile(r"step-([0-9]+)\.npz")
NamedArrays = Iterable[tuple[str, np.ndarray]]
Predicate = Callable[[str], bool]
_BLOCK_BYTES = 1 << 20
_LOCAL_HEADER_BYTES, _LENGTHS = 30, struct.Struct("<26xHH")  # of the name and the extra field of a member

# Two writers in one folder would remove each other's unfinished files.
_one_writer = threading.Lock()


class DamagedError(ValueError):
    """A file is damaged: its bytes are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """The location of an array in a file, in C order and native byte order.

    Args:
        path: The file.
        offset: Bytes before the array.
        dtype: The type of its elements.
        shape: Its shape, with at least one element.
        checksum: Its checksum, from `checksums.checksum`; "" if that of the zip file was compared.
        is_finite: Whether all elements are finite; True if unknown.
    """

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    checksum: str = ""
    is_finite: bool = True

    @property
    def num_bytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, arrays: NamedArrays, keep: int) -> None:
    """Write a file, flush it to disk, and remove the oldest files of its folder.

    Args:
        path: The file, `step-*.npz`; its folder, but no parent of it, is created if absent.
        arrays: Names and arrays. A generator is closed before the function returns.
        keep: Number of files to keep, with their part files.

    Raises:
        OSError: If the file cannot be written; earlier files are kept. It names the file.

    Example:
        >>> write(Path("checkpoints/step-00000240.npz"), {"weights/kernel": kernel}.items(), keep=3)
    """
    try:
        with _one_writer:
            path.parent.mkdir(exist_ok=True)
            atomic_file.remove_unfinished(path.parent, "step-")
            try:
                with _closed(arrays), atomic_file.new(path) as file:
                    _pack(file, arrays)
                # Files of later steps are damaged, since the run has resumed from an earlier one.
                for old in [other for other in paths(path.parent) if _order(other) <= _order(path)][:-keep]:
                    old.unlink(missing_ok=True)
            finally:
                _remove_unnamed_parts(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk has no file name
        raise


@contextlib.contextmanager
def _closed(arrays: NamedArrays) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(arrays, Generator):
            arrays.close()


def _remove_unnamed_parts(folder: Path) -> None:
    """Remove part files of removed checkpoints and of failed writes; keep those of an unreadable checkpoint."""
    part_paths = [path for path in folder.iterdir() if _PART_NAME.fullmatch(path.name)]
    if not part_paths:
        return
    states = {path.stem: _read_state(path) for path in paths(folder)}
    for path in part_paths:
        step = path.name.partition(".")[0]
        if step not in states or path.name not in _named_parts(states[step], default=path.name):
            with contextlib.suppress(OSError):  # tried again after the next write
                path.unlink()


def _named_parts(state: dict[str, Any] | None, default: str) -> list[str]:
    if state is None:
        return [default]
    return [str(part.get("file")) for part in state.get(PART_FILES, []) if isinstance(part, dict)]


def paths(directory: Path) -> list[Path]:
    """Return the checkpoint files of a folder in the order of their steps."""
    named = [path for path in directory.glob("step-*.npz") if _NAME.fullmatch(path.name)]
    return sorted((path for path in named if path.is_symlink() or not path.is_dir()), key=_order)


def parse_step(path: Path) -> int:
    """Return the step in the name of a checkpoint file.

    >>> parse_step(Path("checkpoints/step-00000240.npz"))
    240
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _order(path: Path) -> tuple[int, str]:
    """Return the sort key of a file: the step comes first, as names of steps beyond 99,999,999 are longer."""
    return parse_step(path), path.name


def encode(arrays: NamedArrays) -> bytes:
    """Return the bytes of a file with these arrays, which are read one at a time to save memory."""
    buffer = io.BytesIO()
    _pack(buffer, arrays)
    return buffer.getvalue()


def decode(source: Path | bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a file, or of its bytes, by name; see `decode_partly` for the errors."""
    return decode_partly(source, lambda name: False)[0]


def decode_partly(source: Path | bytes, stays: Predicate) -> tuple[dict[str, np.ndarray], dict[str, Stored]]:
    """Read arrays by name, and locate those that stay in the file; all checksums are compared.

    Args:
        source: The file, or its bytes.
        stays: Whether the array of a name may stay in the file.

    Raises:
        DamagedError: If bytes are missing or changed, or `source` is not a regular file.
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be opened.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else _opened(source) as file:
        try:
            return _unpack(file, stays, None if isinstance(source, bytes) else source)
        except MemoryError:  # not damage: no array is larger than the file
            raise
        except Exception as error:  # zipfile raises many kinds of errors for damaged bytes
            raise DamagedError(f"{error}"[:100]) from error


def read_run(path: Path) -> str | None:
    """Return the identity of the run that wrote a file; None if the file is damaged."""
    run = (_read_state(path) or {}).get("run")
    return run if isinstance(run, str) else None


def _read_state(path: Path) -> dict[str, Any] | None:
    """Return the JSON of a file; None if it is damaged."""
    try:
        with _opened(path) as file, zipfile.ZipFile(file) as archive:
            state = json.loads(str(_parse(archive.read(f"{STATE}.npy"))))
    except Exception:
        return None
    return state if isinstance(state, dict) else None


def _opened(path: Path) -> IO[bytes]:
    try:
        return atomic_file.opened(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise DamagedError("it is a broken link") from None
        raise
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise DamagedError("it is not a file") from error
        raise


def _unpack(file: IO[bytes], stays: Predicate, path: Path | None) -> tuple[dict[str, np.ndarray], dict[str, Stored]]:
    size_bytes = file.seek(0, os.SEEK_END)
    arrays: dict[str, np.ndarray] = {}
    stored: dict[str, Stored] = {}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in members):
            raise DamagedError("it is compressed")
        if sum(info.file_size for info in members) > size_bytes:
            raise DamagedError("its arrays are larger than the file")
        # Reading a member verifies its checksum before it is parsed. It is read by `info`, not by name, as a flipped
        # bit may have changed one name into another.
        for info in members:
            name = info.filename.removesuffix(".npy")
            if name in arrays or name in stored:
                raise DamagedError(f"it has two arrays {name[:40]!r}")
            location = _locate(archive, info, file, path) if path is not None and stays(name) else None
            if location is None:
                arrays[name] = _parse(archive.read(info))
            else:
                stored[name] = location
    return arrays, stored


def _locate(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes], path: Path) -> Stored | None:
    """Compare the checksum of an array and return its location; None if it is not plain."""
    with archive.open(info) as member:
        shape, is_fortran, dtype = _header(member)
        header_bytes = member.tell()
        if is_fortran or not is_plain(dtype) or not math.prod(shape):
            return None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != info.file_size - header_bytes:
            raise DamagedError("an array has another size than its header says")
        is_finite = True
        while block := member.read(_BLOCK_BYTES):  # the last read raises an error if the checksum differs
            is_finite = is_finite and (dtype.kind not in "fc" or bool(np.isfinite(np.frombuffer(block, dtype)).all()))
    file.seek(info.header_offset)
    lengths = _LENGTHS.unpack(file.read(_LOCAL_HEADER_BYTES))
    offset = info.header_offset + _LOCAL_HEADER_BYTES + sum(lengths) + header_bytes
    return Stored(path, offset, dtype, shape, is_finite=is_finite)


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is a plain number in native byte order."""
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16 and dtype.names is None


def _pack(file: IO[bytes], arrays: NamedArrays) -> None:
    """Write arrays as `numpy.savez` does, one at a time."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _parse(content: bytes) -> np.ndarray:
    """Parse an array; NumPy's `read_array` would allocate whatever size a damaged header states."""
    file = io.BytesIO(content)
    shape, is_fortran, dtype = _header(file)
    data = memoryview(content)[file.tell() :]
    if dtype.hasobject or not dtype.itemsize:  # the size cannot be checked if elements have 0 bytes
        raise DamagedError("an array has a type that no run writes")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise DamagedError("an array has another size than its header says")
    array: np.ndarray = np.ndarray(shape, dtype, data, order="F" if is_fortran else "C").copy(order="K")
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape of an array, whether it is in Fortran order, and its type."""
    read_header = _HEADERS[np.lib.format.read_magic(file)]
    try:
        header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read_header(file)
    except MemoryError as error:  # raised by Python's parser for text that is nested too deeply
        raise DamagedError("a header cannot be read") from error
    return header


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
