"""Part files: arrays of a checkpoint that other processes hold and write, at the same time as the first writes its own.

    step-00000240.npz                   arrays of the first process; JSON with names and checksums of the parts
    step-00000240.3f9c21ab.1-of-2.part  arrays of worker 1, one after another without a gap
    step-00000240.3f9c21ab.2-of-2.part  arrays of worker 2

The .npz file is complete after its parts, so it never names one that is not. The digits in the middle are new at every
write: the parts of a file that is replaced stay until it is.
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
from tfpar.checkpoint.held_copies import Copies
from tfpar.files import atomic_file

_NAME = re.compile(r"(step-[0-9]+)\.[0-9a-f]{8}\.[0-9]+-of-[0-9]+\.part")
_TYPE = re.compile(r"[<|]([biu][1248]|f[248])")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_WRITTEN = ".data-00000-of-00001"  # the end of the name under which TensorFlow writes a file of its own format
_ERRORS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
    tf.errors.UnknownError: errno.EIO,
}


def with_parts(
    path: Path, arrays: Mapping[str, np.ndarray], state: dict[str, Any], copies: Sequence[Copies]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a checkpoint's file, while other processes write their parts of it.

    Args:
        path: The file, `step-*.npz`, in an existing folder.
        arrays: The arrays of this process by name.
        state: The JSON of the checkpoint, the last array that is yielded.
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
    """Write a part; return its description for the JSON of the checkpoint."""
    path = prefix.with_name(f"{prefix.name}.part")
    try:
        found = copies.write(str(prefix.absolute()))
    except tuple(_ERRORS) as error:
        code = next(code for kind, code in _ERRORS.items() if isinstance(error, kind))
        raise OSError(code, f"{os.strerror(code)} on {holders.label(copies.host)}", str(path)) from error
    written = prefix.with_name(prefix.name + _WRITTEN)
    entries = [
        {"name": name, "type": np.dtype(tensor.dtype.as_numpy_dtype).str, "shape": [*tensor.shape], "checksum": one}
        for (name, tensor), one in zip(copies.tensors.items(), found, strict=True)
    ]
    with atomic_file.opened(written) as file:
        if os.fstat(file.fileno()).st_size != _num_bytes(entries):
            raise OSError(errno.EIO, f"Other bytes than written by {holders.label(copies.host)}", str(path))
        os.fsync(file.fileno())
    written.replace(path)
    prefix.with_name(f"{prefix.name}.index").unlink(missing_ok=True)
    return {"file": path.name, "arrays": entries}


def _num_bytes(entries: Sequence[dict[str, Any]]) -> int:
    return sum(math.prod(one["shape"]) * np.dtype(one["type"]).itemsize for one in entries)


def unpack(path: Path, state: dict[str, Any], stays: Predicate) -> tuple[dict[str, np.ndarray], dict[str, Stored]]:
    """Return the arrays of the parts of a checkpoint by name, and the places of those that stay in their files.

    Args:
        path: The file of the checkpoint.
        state: Its JSON.
        stays: Whether an array stays in its file, by its name; else it is read, and its checksum compared.

    Raises:
        DamagedError: If a part is missing, of another size or of another checkpoint.
        FileNotFoundError: If a part and the checkpoint's file were removed since.
    """
    arrays: dict[str, np.ndarray] = {}
    stored: dict[str, Stored] = {}
    described = state.get(PART_FILES, [])
    if not isinstance(described, list):
        raise DamagedError(f"its {PART_FILES} are {described!r:.40}")
    for part in described:
        for name, place in _places(path, part).items():
            if name in arrays or name in stored:
                raise DamagedError(f"it has two arrays {name[:40]!r}")
            if stays(name):
                stored[name] = place
            else:
                arrays[name] = _read(name, place)
    return arrays, stored


def _places(path: Path, part: Any) -> dict[str, Stored]:
    """Return the places of the arrays of a part, after a check of its size."""
    try:
        name, entries = str(part["file"]), part["arrays"]
        found = _NAME.fullmatch(name)
        if found is None or found[1] != path.stem:
            raise DamagedError(f"its part {name[:60]!r} is of another checkpoint")
        file, offset, places = path.with_name(name), 0, {}
        for one in entries:
            is_written = _TYPE.fullmatch(one["type"]) and _CHECKSUM.fullmatch(one["checksum"])
            if not is_written or not all(isinstance(size, int) and size > 0 for size in one["shape"]):
                raise ValueError(one)
            place = Stored(file, offset, np.dtype(one["type"]), tuple(one["shape"]), one["checksum"])
            offset += place.num_bytes
            places[str(one["name"])] = place
        if len(places) != len(entries):
            raise ValueError(entries)
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError("the description of a part is not one that a run writes") from error
    _check_size(path, file, offset)
    return places


def _check_size(path: Path, file: Path, num_bytes: int) -> None:
    try:
        with atomic_file.opened(file) as opened:
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        if not path.exists():  # removed since, with its parts
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise DamagedError(f"its part {file.name} is missing") from error
    if size != num_bytes:
        raise DamagedError(f"its part {file.name} has {size:,} bytes, and was written with {num_bytes:,}")


def _read(name: str, place: Stored) -> np.ndarray:
    with atomic_file.opened(place.path) as file:
        file.seek(place.offset)
        array = np.frombuffer(file.read(place.num_bytes), place.dtype).reshape(place.shape).copy()
    if checksums.checksum(array) != place.checksum:
        raise DamagedError(f"{name[:60]} in {place.path.name} is changed, or of another checkpoint")
    return array
