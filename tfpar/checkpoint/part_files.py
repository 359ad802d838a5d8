"""Part files: arrays of a checkpoint that other processes write, while the first process writes its own.

    step-00000240.npz                   arrays of the first process; JSON with names and checksums of the parts
    step-00000240.3f9c21ab.1-of-2.part  arrays of worker 1, without gaps
    step-00000240.3f9c21ab.2-of-2.part  arrays of worker 2

The .npz file is completed after its parts, so it never names an incomplete one. The digits in the middle are random, so
that writing a checkpoint again leaves the old parts in place until the .npz file is replaced.
"""

from __future__ import annotations

import concurrent.futures
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.checkpoint import checksums, holders
from tfpar.checkpoint.file_format import PART_FILES, STATE, DamagedError, Predicate, Stored
from tfpar.checkpoint.remote_copies import Copies
from tfpar.files import atomic_file

_NAME = re.compile(r"(step-[0-9]+)\.[0-9a-f]{8}\.[0-9]+-of-[0-9]+\.part")
_TYPE = re.compile(r"[<|]([biu][1248]|f[248])")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_SUFFIX = ".data-00000-of-00001"  # appended by TensorFlow
_ERRORS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
    tf.errors.UnknownError: errno.EIO,
}


def with_parts(
    path: Path, arrays: Mapping[str, np.ndarray], state: dict[str, Any], copies: Sequence[Copies]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a checkpoint file, while other processes write their part files.

    Args:
        path: The file, `step-*.npz`, in an existing folder.
        arrays: The arrays of this process by name.
        state: The JSON of the checkpoint; it is yielded last, with the names of the part files.
        copies: The arrays of other processes.

    Raises:
        OSError: If a part cannot be written.
    """
    token = secrets.token_hex(4)
    files = [path.with_name(f"{path.stem}.{token}.{index}-of-{len(copies)}") for index in range(1, len(copies) + 1)]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(files)), "tfpar part of checkpoint") as threads:
        running = [threads.submit(_write, *part) for part in zip(files, copies, strict=True)]
        yield from arrays.items()
        described = [part.result() for part in running]
    yield STATE, np.array(json.dumps({**state, PART_FILES: described} if described else state))


def _write(prefix: Path, copies: Copies) -> dict[str, Any]:
    """Write a part file, and return its description for the JSON of the checkpoint."""
    path = prefix.with_name(f"{prefix.name}.part")
    try:
        array_checksums = copies.write(str(prefix.absolute()))
    except tuple(_ERRORS) as error:
        code = next(code for kind, code in _ERRORS.items() if isinstance(error, kind))
        raise OSError(code, f"{os.strerror(code)} on {holders.label(copies.host)}", str(path)) from error
    written = prefix.with_name(prefix.name + _SUFFIX)
    entries = [
        {
            "name": name,
            "type": np.dtype(tensor.dtype.as_numpy_dtype).str,
            "shape": [*tensor.shape],
            "checksum": checksum,
        }
        for (name, tensor), checksum in zip(copies.tensors.items(), array_checksums, strict=True)
    ]
    num_bytes = sum(math.prod(entry["shape"]) * np.dtype(entry["type"]).itemsize for entry in entries)
    with atomic_file.opened(written) as file:
        if os.fstat(file.fileno()).st_size != num_bytes:
            raise OSError(errno.EIO, f"Other bytes than written by {holders.label(copies.host)}", str(path))
        os.fsync(file.fileno())
    written.replace(path)
    prefix.with_name(f"{prefix.name}.index").unlink(missing_ok=True)
    return {"file": path.name, "arrays": entries}


def unpack(path: Path, state: dict[str, Any], stays: Predicate) -> tuple[dict[str, np.ndarray], dict[str, Stored]]:
    """Read the arrays of part files by name, and locate those that stay in their files.

    Args:
        path: The file of the checkpoint.
        state: Its JSON.
        stays: Whether the array of a name stays in its file; else it is read and its checksum compared.

    Raises:
        DamagedError: If a part is missing, of another size or of another checkpoint.
        FileNotFoundError: If the checkpoint has been removed.
    """
    arrays: dict[str, np.ndarray] = {}
    stored: dict[str, Stored] = {}
    described = state.get(PART_FILES, [])
    if not isinstance(described, list):
        raise DamagedError(f"its {PART_FILES} are {described!r:.40}")
    for part in described:
        for name, location in _locate(path, part).items():
            if name in arrays or name in stored:
                raise DamagedError(f"it has two arrays {name[:40]!r}")
            if stays(name):
                stored[name] = location
            else:
                arrays[name] = _read(name, location)
    return arrays, stored


def _locate(path: Path, part: Any) -> dict[str, Stored]:
    """Check the size of a part file, and return the locations of its arrays by name."""
    try:
        name, entries = str(part["file"]), part["arrays"]
        match = _NAME.fullmatch(name)
        if match is None or match[1] != path.stem:
            raise DamagedError(f"its part {name[:60]!r} is of another checkpoint")
        file, offset, locations = path.with_name(name), 0, {}
        for entry in entries:
            is_valid = _TYPE.fullmatch(entry["type"]) and _CHECKSUM.fullmatch(entry["checksum"])
            if not is_valid or not all(isinstance(size, int) and size > 0 for size in entry["shape"]):
                raise ValueError(entry)
            location = Stored(file, offset, np.dtype(entry["type"]), tuple(entry["shape"]), entry["checksum"])
            offset += location.num_bytes
            locations[str(entry["name"])] = location
        if len(locations) != len(entries):
            raise ValueError(entries)
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError("the description of a part is not one that a run writes") from error
    _check_size(path, file, offset)
    return locations


def _check_size(path: Path, file: Path, num_bytes: int) -> None:
    try:
        with atomic_file.opened(file) as opened:
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        if not path.exists():  # removed with its parts
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise DamagedError(f"its part {file.name} is missing") from error
    if size != num_bytes:
        raise DamagedError(f"its part {file.name} has {size:,} bytes, and was written with {num_bytes:,}")


def _read(name: str, location: Stored) -> np.ndarray:
    with atomic_file.opened(location.path) as file:
        file.seek(location.offset)
        array = np.frombuffer(file.read(location.num_bytes), location.dtype).reshape(location.shape).copy()
    if checksums.checksum(array) != location.checksum:
        raise DamagedError(f"{name[:60]} in {location.path.name} is changed, or of another checkpoint")
    return array
