"""Load the batches that the data settings of a run describe, and check that settings and data fit together."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfpar import config
from tfpar.data import images, input_pipeline
from tfpar.data.errors import user_message
from tfpar.data.input_pipeline import Augment, Finish
from tfpar.data.sharding.sharded import Sharded
from tfpar.data.sharding_policy import ALL_READ, sharding_policy
from tfpar.data.sources import (
    image_folder,
    python_function,
    python_source,
    split,
    synthetic,
    table,
    tfds,
    tfrecord,
)

_SPLIT_READERS = {"tfds": tfds.read, "tfrecord": tfrecord.read, "python_source": python_source.read}
_READERS = {
    "image_folder": image_folder.read,
    "table": table.read,
    "python": python_function.read,
}
VALIDATION_SHARE = 10  # generated: one validation row for ten training rows
MAX_VALIDATION_ROWS = 100_000


class Loaded(NamedTuple):
    """The data of a run: batches `(inputs, labels)` of the global batch size, with shapes and classes for a model."""

    train: tf.data.Dataset | Sharded  # Sharded if sharded by file or by example
    validation: tf.data.Dataset | None
    num_train_examples: int | None  # None: unknown before the first epoch ends (TFRecord files have no count)
    num_classes: int | None  # None: regression, or text
    input_shape: tuple[int, ...]  # of one example; () for a table
    sharding: str  # how the training examples are assigned to workers, and why
    class_names: tuple[str, ...] | None = None  # of labels 0, 1, ..., if classes have names
    columns: tuple[split.Column, ...] | None = None  # of a table, whose inputs are {name: [batch, 1]}


def describe(settings: config.Data) -> str:
    """Describe the origin of the examples in a few words.

    >>> describe(config.Data(name="mnist"))
    'mnist'
    """
    words = {
        "tfds": settings.name,
        "tfrecord": f"TFRecord files in {settings.directory}",
        "image_folder": f"images in {settings.directory}",
        "table": f"tables in {settings.directory}",
        "python": f"examples of {settings.function}",
        "generated": "generated",
        "python_source": f"Python source files in {settings.directory or 'the standard library'}",
    }
    return words[settings.source]


def load(settings: config.Data, *, global_batch_size: int, seed: int, augment: Augment | None = None) -> Loaded:
    """Load the training and validation batches that the settings describe.

    Only training data are shuffled and augmented. Order and augmentation depend only on `seed`, and on the global seed
    (`tf.random.set_seed`) if it is set, so that `seek` can return to any position. The training batches are `Sharded`
    if `data.shard_by` is "file" or "example".

    Args:
        settings: The section `data` of a run.
        global_batch_size: Examples in one batch over all replicas; the last batch of an epoch may be smaller.
        seed: Seed of order, augmentation and generated rows.
        augment: Function `(image, seed)` that returns an image of the same shape and dtype. It changes each training
            image before the augmentation of the settings; `seed` is an int64 tensor `[2]` for `tf.image.stateless_*`.

    Returns:
        The batches, with shapes and classes for a model.

    Raises:
        ValueError: If the settings do not fit the data, or the data cannot be used.
        FileNotFoundError: If a folder or file is missing.
        OSError: If a folder cannot be written, or a dataset cannot be downloaded (ConnectionError).

    >>> settings = config.Data(source="generated", num_examples=100, num_features=3)
    >>> load(settings, global_batch_size=32, seed=0).input_shape
    (3,)
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be at least 1, but is {global_batch_size}.")
    if settings.source == "generated":
        return _generated(settings, global_batch_size, seed, augment)
    try:
        return _stored(settings, global_batch_size, seed, augment)
    except tf.errors.OpError as error:
        if sentence := user_message(error, settings):
            raise ValueError(sentence) from error
        raise


def _stored(settings: config.Data, global_batch_size: int, seed: int, augment: Augment | None) -> Loaded:
    train, held_out = _read(settings)
    _check_inputs(settings, train, split.first_input(train), augment)
    finish = _finish(settings, train)
    policy = sharding_policy(settings, train, global_batch_size)
    batches = input_pipeline.training(
        train, settings, policy, global_batch_size=global_batch_size, seed=seed, augment=augment, finish=finish
    )
    validation = None
    if held_out is not None:
        _check_validation(train, held_out, split.first_input(held_out))
        stored = held_out.decoded().cache() if settings.cache else held_out.decoded()
        validation = input_pipeline.ready(stored.batch(global_batch_size), finish)
    return Loaded(
        batches,
        validation,
        train.num_examples,
        train.num_classes,
        () if train.columns is not None else tuple(train.decoded().element_spec[0].shape),
        policy.sentence,
        train.class_names,
        train.columns,
    )


def _read(settings: config.Data) -> tuple[split.Split, split.Split | None]:
    if settings.source in _READERS:
        return _READERS[settings.source](settings)
    read, validation = _SPLIT_READERS[settings.source], settings.validation_split
    return read(settings, settings.train_split), None if validation is None else read(settings, validation)


def _check_validation(train: split.Split, held_out: split.Split, first: tf.Tensor) -> None:
    if train.columns is not None:  # checked by the reader
        return
    shape = train.decoded().element_spec[0].shape
    if first.shape != shape:
        raise ValueError(
            f"Validation inputs must have the shape of training inputs, but those of the {held_out.origin} have "
            f"{first.shape} and those of the {train.origin} have {shape}: correct one of them."
        )


def _finish(settings: config.Data, train: split.Split) -> Finish:
    """Return the function that is mapped over batches last: it checks labels and normalizes inputs."""
    if (columns := train.columns) is not None:
        return lambda packed, labels: (table.unpacked(columns, packed), labels)
    normalize: Callable[[tf.Tensor], tf.Tensor] = tf.identity
    if settings.normalization == "unit":
        normalize = images.unit
    elif settings.normalization == "standard":
        statistics = images.measure(train.decoded().map(lambda inputs, label: inputs))
        normalize = lambda inputs: images.standard(inputs, statistics)  # noqa: E731

    def finish(inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if train.num_classes is not None:
            labels = split.check_labels(labels, train.num_classes)
        return normalize(inputs), labels

    return finish


def _check_inputs(settings: config.Data, train: split.Split, inputs: tf.Tensor, augment: Augment | None) -> None:
    _, labels = train.decoded().element_spec
    if train.columns is not None:
        if augment:
            raise ValueError("Augmentation changes images, but the rows of a table are none: leave it out.")
        return
    if (settings.augmentation or augment) and inputs.shape.rank != 3:
        raise ValueError(
            f"Augmentation changes images [height, width, channels], but the inputs have shape {inputs.shape}: "
            "remove data.augmentation."
        )
    allowed = inputs.dtype.is_floating or inputs.dtype in (tf.uint8, tf.uint16)
    if settings.normalization == "unit" and not allowed:
        raise ValueError(
            f'data.normalization "unit" is for images of type uint8, uint16 or float, but the inputs are '
            f'{inputs.dtype.name}: set it to "none".'
        )
    if settings.normalization == "unit" and inputs.shape.rank == 3 and inputs.dtype.is_floating:
        lowest, highest = float(tf.reduce_min(inputs)), float(tf.reduce_max(inputs))
        if lowest < 0 or highest > 1:
            raise ValueError(
                f'data.normalization "unit" leaves float images as they are, but the first one runs from {lowest:g} to '
                f'{highest:g}: set it to "standard" or "none".'
            )
    if settings.normalization == "standard" and not (allowed or inputs.dtype.is_integer):
        raise ValueError(f'data.normalization "standard" is for numbers, but the inputs are {inputs.dtype.name}.')
    if train.num_classes is not None and not (labels.dtype.is_integer and labels.shape.rank == 0):
        raise ValueError(
            f"Labels of {train.num_classes} classes must be single integers, but are {labels.dtype.name} of shape "
            f"{labels.shape}: correct data.label_key, or leave data.num_classes out."
        )


def _generated(settings: config.Data, global_batch_size: int, seed: int, augment: Augment | None) -> Loaded:
    if settings.augmentation or augment:
        raise ValueError("Augmentation changes images, but generated rows are none: remove data.augmentation.")
    num_validation = min(max(1, settings.num_examples // VALIDATION_SHARE), MAX_VALIDATION_ROWS)

    def rows(num_examples: int, first_row: int, shuffle: bool) -> tf.data.Dataset:
        return synthetic.regression(
            num_examples,
            num_features=settings.num_features,
            noise=settings.noise,
            global_batch_size=global_batch_size,
            seed=seed,
            first_row=first_row,
            shuffle=shuffle,
        )

    train = rows(settings.num_examples, 0, settings.shuffle_buffer > 0)
    validation = None if settings.validation_split is None else rows(num_validation, settings.num_examples, False)
    sharding = f"by batch, because the rows are generated and not stored: {ALL_READ}"
    return Loaded(train, validation, settings.num_examples, None, (settings.num_features,), sharding)
