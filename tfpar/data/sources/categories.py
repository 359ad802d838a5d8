"""Category columns: their vocabularies, from the training rows, and words as one-hot vectors.

As `keras.layers.StringLookup(output_mode="one_hot")` with the sorted words as its vocabulary: the first entry is
for all words that are not in a training row.

    color            vocabulary            blue     green     red
    red, blue, green (blue, green, red)    0 1 0 0  0 0 1 0   0 0 0 1     and grey, in validation: 1 0 0 0
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfpar import config
from tfpar.data.sources.split import check, close_to
from tfpar.messages import received

Vocabularies = Mapping[str, tuple[str, ...]]
MAX_WORDS = 10_000  # of one column: more are no categories but names or numbers
EMPTY = "A cell of a column of words is empty."  # the file is read once more to name the cell
SPACE = " \t\n\r\v\f"  # removed by tf.strings.strip


def check_names(settings: config.Data, inputs: Sequence[str], path: object) -> None:
    """Refuse a category column that is no input column of a file.

    Args:
        settings: Uses `category_columns`.
        inputs: The names of the input columns.
        path: The file, for the message.

    Raises:
        ValueError: If there is one.
    """
    for name in settings.category_columns or ():
        if name not in inputs:
            raise ValueError(f'data.category_columns = "{name}" is no input column of {path}: {close_to(name, inputs)}')


def vocabularies(names: Sequence[str], blocks: Iterable[Sequence[Iterable[str]]], origin: str) -> Vocabularies:
    """Return the words of each column, sorted.

    Args:
        names: Of the columns.
        blocks: For each block of rows, the words of each column.
        origin: The origin of the rows, for messages.

    Raises:
        ValueError: If a column has more than `MAX_WORDS` words.

    >>> vocabularies(["color"], [[["red", "blue"]], [["red"]]], "here")
    {'color': ('blue', 'red')}
    """
    found: dict[str, set[str]] = {name: set() for name in names}
    for block in blocks:
        for (name, words), own in zip(found.items(), block, strict=True):
            words.update(own)
            if len(words) > MAX_WORDS:
                raise ValueError(
                    f"A column of data.category_columns must have at most {MAX_WORDS:,} different words, and "
                    f"{received.toml(name)} of the {origin} has more: leave it out of the inputs."
                )
    return {name: tuple(sorted(words)) for name, words in found.items()}


def width(name: str, found: Vocabularies) -> int:
    """Return the width of a column in a row: 1, or the length of its one-hot vector."""
    return 1 + len(found[name]) if name in found else 1


def one_hot_channels(inputs: Sequence[str], found: Vocabularies) -> tuple[bool, ...]:
    """Return which entries of a row belong to category columns; empty if there are none."""
    return tuple(name in found for name in inputs for _ in range(width(name, found))) if found else ()


def encode(words: tf.Tensor, vocabulary: Sequence[str]) -> tf.Tensor:
    """Return words `[rows]` as one-hot vectors float32 `[rows, 1 + words]`.

    >>> encode(tf.constant(["red", "grey"]), ["blue", "red"]).numpy().tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    equal = words[:, tf.newaxis] == tf.constant(vocabulary, tf.string, [len(vocabulary)])
    unknown = ~tf.reduce_any(equal, axis=1, keepdims=True)
    return tf.cast(tf.concat([unknown, equal], axis=1), tf.float32)


def encode_array(words: Sequence[str], vocabulary: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the one-hot vectors of `encode`, computed without TensorFlow.

    >>> encode_array(["red", "grey"], ["blue", "red"]).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    places = {word: place for place, word in enumerate(vocabulary, start=1)}
    encoded = np.zeros([len(words), 1 + len(vocabulary)], np.float32)
    encoded[np.arange(len(words)), [places.get(word, 0) for word in words]] = 1
    return encoded


def strip(words: tf.Tensor) -> tf.Tensor:
    """Return words without surrounding whitespace; the graph fails at an empty one."""
    stripped = tf.strings.strip(words)
    return check(tf.reduce_all(stripped != ""), tf.constant(EMPTY), stripped)
