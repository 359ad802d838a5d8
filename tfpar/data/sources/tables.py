"""Tables, independent of the format of their files: the input columns, and the label of a row."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from tfpar import config
from tfpar.data.sources import categories
from tfpar.data.sources.split import check, close_to

# Rows that are read at once. Fixed, because the interleaved order of several files depends on it.
BLOCK_ROWS = 256


class Columns(NamedTuple):
    """The names of the columns that are read, and their indices in the file."""

    inputs: tuple[str, ...]
    label: str
    places: tuple[int, ...]  # of the inputs, then of the label


def selected_columns(settings: config.Data, names: Sequence[str], path: Path) -> Columns:
    """Return the columns of a file that the settings select.

    Args:
        settings: Uses `columns` and `label_key`.
        names: The columns of the file, in its order.
        path: The file, for messages.

    Raises:
        ValueError: A column that the file does not have, or has twice, or no input column.

    >>> selected_columns(config.Data(source="csv", directory=".", label_key="y"), ["a", "y", "b"], Path("t.csv")).places
    (0, 2, 1)
    """
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise ValueError(f'{path} has more than one column "{twice[0]}": name each once.')
    inputs = settings.columns or tuple(name for name in names if name != settings.label_key)
    for key, wanted in (("label_key", (settings.label_key,)), ("columns", inputs)):
        for name in wanted:
            if name not in names:
                raise ValueError(f'data.{key} = "{name}" is no column of {path}: {close_to(name, names)}')
    if not inputs:
        raise ValueError(f'{path} has no column except the label "{settings.label_key}": add an input column.')
    categories.check_names(settings, inputs, path)
    places = tuple(list(names).index(name) for name in (*inputs, settings.label_key))
    return Columns(tuple(inputs), settings.label_key, places)


def num_classes(settings: config.Data) -> int | None:
    """Return the number of classes; None for regression.

    >>> num_classes(config.Data(source="csv", directory=".", class_names=("no", "yes")))
    2
    """
    return settings.num_classes if settings.class_names is None else len(settings.class_names)


def labels(settings: config.Data, values: tf.Tensor) -> tf.Tensor:
    """Return the labels of rows: numbers float32 `[rows, 1]` for regression, or classes int32 `[rows]`.

    Args:
        settings: Uses `class_names` and `num_classes`.
        values: `[rows]`; words if classes have names, else numbers.

    >>> labels(config.Data(source="csv", directory=".", class_names=("no", "yes")), tf.constant(["yes"])).numpy()
    array([1], dtype=int32)
    """
    if settings.class_names is not None:
        equal = tf.strings.strip(values)[:, tf.newaxis] == tf.constant(settings.class_names)
        known = tf.reduce_any(equal, axis=1)
        return check(tf.reduce_all(known), tf.constant(WRONG_LABEL), tf.argmax(equal, axis=1, output_type=tf.int32))
    if settings.num_classes is None:
        return values[:, tf.newaxis]
    right = (values >= 0) & (values < settings.num_classes) & (values == tf.round(values))
    return check(tf.reduce_all(right), tf.constant(WRONG_LABEL), tf.cast(values, tf.int32))


WRONG_LABEL = "A label is none of the classes."  # the file is read once more to name the row


def label_problem(settings: config.Data, value: object) -> str | None:
    """Return the problem of an invalid label as a clause; None for a valid label.

    Args:
        settings: As for `labels`.
        value: A word, or a number.

    >>> label_problem(config.Data(source="csv", directory=".", num_classes=3), 3)
    'must be an integer in 0 to 2, as data.num_classes = 3'
    """
    if settings.class_names is not None:
        word = str(value).strip()
        if word in settings.class_names:
            return None
        return f"is none of data.class_names: {close_to(word, settings.class_names)}".rstrip(".")
    number = float(value)  # type: ignore[arg-type]
    if settings.num_classes is None or (number.is_integer() and 0 <= number < settings.num_classes):
        return None
    return f"must be an integer in 0 to {settings.num_classes - 1}, as data.num_classes = {settings.num_classes}"
