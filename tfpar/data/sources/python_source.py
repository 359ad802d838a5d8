r"""The source files of Python's standard library as bytes: real text that every machine has.

A file gives windows of `context_bytes + 1` bytes, with inputs and labels one byte apart. Adjacent windows share one
byte, so that each byte after the first is predicted once. A remainder that is too short for a window is dropped:

    file      d e f   f ( x ) : \n          context_bytes = 3
    window 0 [d e f  ]                     d e f -> e f _
    window 1       [  f ( x]               _ f ( -> f ( x
    window 2             [x ) : \n]         x ) : -> ) : \n
"""

import functools
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar import config
from tfpar.data.sources.files import EXAMPLES_IN_A_ROW, FILES_AT_ONCE
from tfpar.data.sources.held_out import name_hash
from tfpar.data.sources.split import Split
from tfpar.messages import received

NUM_BYTES = 256  # values of one byte, the number of classes
HELD_OUT_SHARE = 0.1  # of the files, for split "test"
# Installed packages do not belong to the library, and its tests are not installed everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

_SPLIT = re.compile(r"(train|test)(?:\[(?:([0-9]{1,3})%)?:(?:([0-9]{1,3})%)?\])?")


def read(settings: config.Data, split: str) -> Split:
    """Read one split of the Python source files: all windows of its files, read on demand.

    Args:
        settings: Uses `context_bytes`, and `directory` instead of the folder of the standard library.
        split: "train", or "test" for the held-out files, or a share of them such as `train[:10%]`.

    Returns:
        Stored windows, uint8 `[context_bytes + 1]`, decoded to inputs and labels, int32 `[context_bytes]`.

    Raises:
        FileNotFoundError: If there is no such folder, or no source file in it.
        ValueError: If the split has an unknown name or holds no window.
    """
    window_bytes = settings.context_bytes + 1
    counts = {path: (path.stat().st_size - 1) // settings.context_bytes for path in files(settings, split)}
    counts = {path: count for path, count in counts.items() if count > 0}
    if not counts:
        raise ValueError(
            f'No file of split "{split}" in {_folder(settings)} holds the {window_bytes} bytes of one window: take a '
            "larger part of the files, or lower data.context_bytes."
        )
    paths = list(counts)

    def read_files(num_shards: int, shard: int) -> tf.data.Dataset:
        own = paths[shard::num_shards]
        return _windows(own, settings.context_bytes, sum(counts[path] for path in own))

    return Split(
        stored=read_files(1, 0),
        decode=_decode,
        num_examples=sum(counts.values()),
        num_classes=None,  # a label is a row of bytes, not one class
        origin=f'split "{split}" of the source files in {_folder(settings)}',
        read_files=read_files,
        num_files=len(paths),
        encoded=False,
    )


def files(settings: config.Data, split: str) -> list[Path]:
    """List the files of a split, in an order that mixes the packages and is the same on every machine.

    The order and the held-out files depend on a hash of each name. So a file stays in its split when others are added
    or removed, and a share of the files is a random sample.

    Args:
        settings: Uses `directory`.
        split: As for `read`.

    Raises:
        FileNotFoundError: If there is no such folder, or no source file in it.
        ValueError: If the split has an unknown name.
    """
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise ValueError(
            f'A split of Python source files must be "train" or "test", or a share of one such as "train[:10%]", '
            f"received {received.toml(split)}."
        )
    folder = _folder(settings)
    paths = [path for path in folder.rglob("*.py") if _is_source(path, folder)]
    hashes = {path: name_hash(path.relative_to(folder).as_posix()) / 2**64 for path in paths}
    if not hashes:
        raise FileNotFoundError(
            f"Python source files must be in {folder}, but none was found there: set data.directory to a folder that "
            "holds some."
        )
    paths = [path for path, hash_ in hashes.items() if (hash_ < HELD_OUT_SHARE) == (match[1] == "test")]
    paths.sort(key=hashes.__getitem__)
    begin, end = (len(paths) * int(percent) // 100 for percent in (match[2] or 0, match[3] or 100))
    return paths[begin:end]


def unigram_entropy(batches: Iterable[tuple[Any, Any]]) -> float:
    """Return the entropy of the labels' byte frequencies in bits per byte: the loss of the best model without context.

    H = - sum p log2 p (Shannon, "A Mathematical Theory of Communication", 1948, section 7).

    Args:
        batches: At least one batch `(inputs, labels)`; labels are integers from 0 to 255 of any shape.

    >>> unigram_entropy([(None, [[0, 1], [2, 3]])])
    2.0
    """
    counts = np.zeros(NUM_BYTES, np.int64)
    for _, labels in batches:
        counts += np.bincount(np.asarray(labels).ravel(), minlength=NUM_BYTES)
    shares = counts[counts > 0] / counts.sum()
    return float(-np.sum(shares * np.log2(shares)))


def _folder(settings: config.Data) -> Path:
    return Path(os.path.expanduser(settings.directory or sysconfig.get_path("stdlib")))


def _is_source(path: Path, folder: Path) -> bool:
    return path.is_file() and LEFT_OUT.isdisjoint(path.relative_to(folder).parts)


def _windows(paths: list[Path], context_bytes: int, num_windows: int) -> tf.data.Dataset:
    """Return all windows of some files, with a few files open at a time."""
    windows = tf.data.Dataset.from_tensor_slices([str(path) for path in paths]).interleave(
        functools.partial(_windows_of_file, context_bytes=context_bytes),
        cycle_length=min(FILES_AT_ONCE, len(paths)),
        block_length=EXAMPLES_IN_A_ROW,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return windows.apply(tf.data.experimental.assert_cardinality(num_windows))


def _windows_of_file(name: tf.Tensor, context_bytes: int) -> tf.data.Dataset:
    content = tf.io.decode_raw(tf.io.read_file(name), tf.uint8)
    num_bytes = (tf.size(content) - 1) // context_bytes * context_bytes
    inputs = tf.reshape(content[:num_bytes], [-1, context_bytes])
    last = content[context_bytes : num_bytes + 1 : context_bytes]
    return tf.data.Dataset.from_tensor_slices(tf.concat([inputs, last[:, tf.newaxis]], axis=1))


def _decode(window: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    values = tf.cast(window, tf.int32)
    return values[:-1], values[1:]
