"""Arrays of checkpoints that other processes read into their own memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.checkpoint import checksums
from tfpar.checkpoint.file_format import DamagedError, Stored

_UNREADABLE = (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.DataLossError)


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """An array in the memory of another process, whose CPU is `host`."""

    host: str
    tensor: tf.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the array."""
        dtype: np.dtype[Any] = np.dtype(self.tensor.dtype.as_numpy_dtype)
        return dtype

    def astype(self, dtype: np.dtype[Any]) -> RemoteArray:
        """Return the array converted to another type."""
        with tf.device(self.host):
            return RemoteArray(self.host, tf.cast(self.tensor, dtype))

    def is_as_finite_as(self, other: RemoteArray) -> bool:
        """Return whether the same elements of both arrays are finite."""
        with tf.device(self.host):
            finite = [
                tf.math.is_finite(array.tensor) if array.tensor.dtype.is_floating else tf.ones(array.shape, tf.bool)
                for array in (self, other)
            ]
            return bool(tf.reduce_all(finite[0] == finite[1]))


def _read(path: tf.Tensor, offset: tf.Tensor, num_bytes: tf.Tensor, rest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    records = tf.data.FixedLengthRecordDataset(path, num_bytes, header_bytes=offset, footer_bytes=rest)
    content = tf.io.decode_raw(records.get_single_element(), tf.uint8)
    return content, checksums.fingerprint(content)


@functools.cache
def _compiled_read() -> Any:
    """Return `_read`, traced once for the devices of all processes."""
    numbers = [tf.TensorSpec([], tf.int64)] * 3
    return tf.function(_read, autograph=False).get_concrete_function(tf.TensorSpec([], tf.string), *numbers)


def read(locations: Mapping[str, Stored], hosts: Mapping[str, str]) -> dict[str, RemoteArray]:
    """Read each array in the process that needs it, in all processes at the same time.

    Args:
        locations: The location of each array by name; names of weights begin with `weights/`.
        hosts: The CPU of the process that needs each array, by name.

    Raises:
        DamagedError: If bytes are missing or changed, or a weight is not finite.
        FileNotFoundError: If a file is missing.
    """
    arrays: dict[str, RemoteArray] = {}
    checks: dict[str, list[tf.Tensor]] = {}
    compiled = _compiled_read()
    for name, location in locations.items():
        with _damage_errors(name, location), tf.device(hosts[name]):
            rest = location.path.stat().st_size - location.offset - location.num_bytes
            where = [tf.constant(number, tf.int64) for number in (location.offset, location.num_bytes, rest)]
            content, checked = compiled(tf.constant(str(location.path.absolute())), *where)
            arrays[name] = RemoteArray(hosts[name], _typed(content, location))
            is_weight = name.startswith("weights/") and location.dtype.kind == "f"
            finite = tf.reduce_all(tf.math.is_finite(arrays[name].tensor)) if is_weight else tf.constant(True)
            checks[name] = [checked, finite]
    for name, (checked, finite) in checks.items():
        with _damage_errors(name, locations[name]):
            if locations[name].checksum not in ("", *checksums.to_hex(checked)):
                raise DamagedError(f"{name[:60]} in {locations[name].path.name} is changed, or of another checkpoint")
            if not bool(finite):
                raise DamagedError(f"{name[:60]} is not finite")
    return arrays


def _typed(content: tf.Tensor, location: Stored) -> tf.Tensor:
    if location.dtype == np.dtype(bool):
        return tf.reshape(tf.cast(content, tf.bool), location.shape)
    size = location.dtype.itemsize
    numbers = tf.bitcast(content if size == 1 else tf.reshape(content, [-1, size]), tf.as_dtype(location.dtype))
    return tf.reshape(numbers, location.shape)


@contextlib.contextmanager
def _damage_errors(name: str, location: Stored) -> Iterator[None]:
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(2, "No such file", str(location.path)) from error
    except _UNREADABLE as error:
        raise DamagedError(f"{name[:60]} cannot be read from {location.path.name}") from error
