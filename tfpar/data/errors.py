"""Messages for TensorFlow's errors in an input pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import tensorflow as tf

from tfpar.messages.reasons import without_control_sequences

if TYPE_CHECKING:
    from tfpar import config

SENTENCE = re.compile(r"assertion failed: \[(.*?)\](?:\s|$)", re.DOTALL)
# What TensorFlow writes before an error of Python code: the graph function, then the transformations around it.
_AROUND = (
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+|Function invocation produced \w+"
)
RAISED = re.compile(
    rf"^(?:\{{\{{.*?\}}\}} ?)?(?:(?:{_AROUND}): )*((?:\w+\.)*\w+: .*?)\nTraceback \(most recent", re.M | re.S
)
_CACHED_TWICE = re.compile(r"cache lockfile already exists \('(.*?)\.lockfile'\)")
# Of TensorFlow's operation, and of sharded class scores.
_LABELS = (
    re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"),
    re.compile(r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)\s+\[\[\{\{node [^}]*crossentropy/GatherV2\}\}"),
)
GONE = re.compile(r"(/\S+); No such file or directory")


def user_message(error: BaseException, settings: config.Data) -> str | None:
    """Explain an error of reading the data in a sentence; return None if it has another cause.

    Known causes are a label out of range, an image of the wrong shape, a record that does not match the declared
    features, and a missing or corrupt file. TensorFlow does not name the file of a corrupt record, so the files are
    read again to find it.

    Args:
        error: The error raised by iterating over a dataset of `load`, directly or in a compiled step.
        settings: The settings given to `load`.

    >>> user_message(KeyError("x"), tfpar.config.Data()) is None
    True
    """
    if isinstance(error, tf.errors.DataLossError):
        return _corrupt(settings)
    if isinstance(error, tf.errors.NotFoundError) and (gone := GONE.search(error.message)):
        return f"The data file {gone.group(1)} is missing: restore it, or prepare the dataset again."
    if isinstance(error, tf.errors.InvalidArgumentError):
        return _refused(error.message, settings)
    if isinstance(error, tf.errors.UnknownError):
        return _raised(error.message)
    return None


def cause_of(error: tf.errors.OpError) -> str:
    r"""Return the cause in TensorFlow's error message, without the operations and functions around it.

    Example:
        >>> cause_of(tf.errors.NotFoundError(None, None, "Graph execution error:\n\nout of rows\n\t [[{{node x}}]]"))
        'out of rows'
    """
    if match := _CACHED_TWICE.search(error.message):
        return (
            f"Another process writes the cache {match[1]!r}. Give each worker a file of its own, such as "
            f"dataset.cache(f'cache-{{strategy.rank}}'); if no other process runs, delete {match[1] + '.lockfile'!r}."
        )
    text, _, _ = without_control_sequences(error.message).partition("\n\t [[")
    if raised := _raised(error.message):
        return raised
    _, _, asserted = text.partition("assertion failed: ")
    if asserted:
        return " ".join(re.findall(r"\[(.*?)\](?=\s|$)", asserted, re.DOTALL)) or asserted
    return [line for line in text.splitlines() if line.strip()][-1].strip() if text.strip() else type(error).__name__


def label_out_of_range(message: str) -> str | None:
    """Explain TensorFlow's message about a label out of range of a sparse cross-entropy; return None for another.

    Example:
        >>> label_out_of_range("out of memory") is None
        True
    """
    match = next(filter(None, (pattern.search(message) for pattern in _LABELS)), None)
    if match is None:
        return None
    label, num_classes = int(match[1]), int(match[2])
    return (
        f"The labels of a sparse cross-entropy are the numbers of classes, from 0 to {num_classes - 1} for a last "
        f"layer of {num_classes} units, received a label value of {label} which is outside the valid range. Number the "
        "classes from 0, or give the last layer one unit for each class."
    )


def _refused(message: str, settings: config.Data) -> str | None:
    """Explain values that the graph refuses; read the images again if the graph does not name the file."""
    from tfpar.data.sources import image_folder, tfrecord

    is_unreadable = settings.source == "image_folder" and image_folder.UNREADABLE.search(message)
    if is_unreadable and (sentence := image_folder.corruption(settings)):
        return sentence
    if sentence := _raised(message):
        return sentence
    match = SENTENCE.search(message)
    return match[1] if match else tfrecord.mismatch(message)


def _raised(message: str) -> str | None:
    """Return the error that Python code in a pipeline raised, without its traceback."""
    match = RAISED.search(message)
    return without_control_sequences(match[1]).removeprefix("ValueError: ").removesuffix(": ") if match else None


def _corrupt(settings: config.Data) -> str:
    from tfpar.data.sources import tfds, tfrecord

    if settings.source == "generated":
        return "TensorFlow reports lost data, but generated data have no files."
    if settings.source not in ("tfds", "tfrecord"):
        return "A record could not be read: repeat the command to resume, or repair the data."
    splits = [split for split in (settings.train_split, settings.validation_split) if split is not None]
    find = tfrecord.files if settings.source == "tfrecord" else tfds.files
    paths: Iterable[Path] = (path for split in splits for path in find(settings, split))
    for path in paths:
        if sentence := tfrecord.corruption(path):
            return sentence
    return "A record could not be read, but all files are intact now: repeat the command to resume."
