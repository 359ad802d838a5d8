"""The stored examples of one split, and checks of them."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import tensorflow as tf

from tfpar.cluster.cores import num_allowed_cores
from tfpar.data.batching.autotuning import without_autotuning
from tfpar.messages.suggestions import closest


class Column(NamedTuple):
    """An input column of a table, with the statistics of its training rows that the settings need.

    Args:
        name: Its name in the files.
        dtype: "float32" for numbers; "string" or "int64" for categories.
        mean: The mean, if `data.normalization` is "standard".
        variance: The variance, if `data.normalization` is "standard".
        vocabulary: The sorted categories; None for numbers.
    """

    name: str
    dtype: str
    mean: float = 0.0
    variance: float = 1.0
    vocabulary: tuple[str, ...] | tuple[int, ...] | None = None


class Split(NamedTuple):
    """A split: its stored examples, and the function that decodes one to `(input, label)`."""

    stored: tf.data.Dataset
    decode: Callable[..., tuple[tf.Tensor, tf.Tensor]] | None  # None: stored as such pairs
    num_examples: int | None
    num_classes: int | None
    origin: str  # for messages, such as 'split "train" of dataset "mnist"'
    read_files: Callable[[int, int], tf.data.Dataset]  # (num_shards, shard) -> stored examples of the files of a shard
    num_files: int
    encoded: bool  # whether inputs are stored as encoded images
    class_names: tuple[str, ...] | None = None
    # (num_shards, shard) -> stored examples of that shard; None: every num_shards-th of all examples
    read_examples: Callable[[int, int], tf.data.Dataset] | None = None
    columns: tuple[Column, ...] | None = None  # of a table, whose inputs are packed by dtype

    def decoded(self) -> tf.data.Dataset:
        """Return single `(input, label)` pairs in stored order."""
        if self.decode is None:
            return self.stored
        return self.stored.map(self.decode, num_parallel_calls=num_allowed_cores())

    def shard(self, kind: Literal["file", "example", "batch"], num_shards: int, shard: int) -> "Split":
        """Return one shard of the split, by file or by example, before decoding; for "batch" the whole split."""
        if kind == "batch":
            return self
        read_examples = self.read_examples or self.stored.shard
        stored = (self.read_files if kind == "file" else read_examples)(num_shards, shard)
        num_examples = int(stored.cardinality())
        return self._replace(stored=stored, num_examples=num_examples if num_examples >= 0 else None)


def close_to(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar name, and all names.

    >>> close_to("colour", ["color", "shape"])
    'did you mean "color"? There are: color, shape.'
    """
    names = list(names)
    near = closest(name, names)
    all_names = f"There are: {', '.join(names) or 'none'}."
    return f'did you mean "{near}"? {all_names}' if near else f"correct or remove it. {all_names}"


def check(condition: tf.Tensor, sentence: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return `value` if the condition holds; else the graph fails with the sentence (see `user_message`)."""
    with tf.control_dependencies([tf.debugging.Assert(condition, [sentence])]):
        return tf.identity(value)


def check_labels(labels: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Return the labels if all are in 0 .. num_classes - 1; else the graph fails and names the first bad label."""
    wide = tf.cast(labels, tf.int64)  # num_classes may not fit into the dtype of the labels
    bad = (wide < 0) | (wide >= num_classes)
    first_bad = tf.reshape(labels, [-1])[tf.argmax(tf.reshape(bad, [-1]))]
    sentence = tf.strings.join(
        [
            "Labels must be from 0 to ",
            f"{num_classes - 1} for {num_classes} classes, but the data contain the label ",
            tf.strings.as_string(first_bad),
            ". Set data.num_classes, or correct the data.",
        ]
    )
    return check(~tf.reduce_any(bad), sentence, labels)


def first_input(split: Split) -> tf.Tensor:
    """Read and decode the first example, and return its input.

    Raises:
        ValueError: If there is no example, or the input has no static shape.
    """
    spec = split.decoded().element_spec
    if not all(leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec[0])):
        raise ValueError(
            f"All inputs must have one fixed shape to form a batch, but those of {split.origin} have {spec[0].shape}. "
            "Store them in one size, or choose another dataset."
        )
    first = next(iter(without_autotuning(split.decoded().take(1))), None)
    if first is None:
        raise ValueError(f"The {split.origin} holds no examples: choose another split, or fill it.")
    return first[0]
